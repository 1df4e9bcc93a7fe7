"""The quantized forms of a KV cache: what they take, what they lose, and what they never hide."""

import pytest
import torch

from pagedd.kernels.kv_form import FORMS, form_of
from pagedd.kernels.row_form import RowForm

QUANTIZED = pytest.mark.parametrize("name", ["int8", "fp8", "int4"])
SIZES = pytest.mark.parametrize("size", [1e-30, 1e-6, 1.0, 1e5, 1e30])


def there_and_back(name: str, x: torch.Tensor) -> torch.Tensor:
    form = RowForm(name)
    values, scales = form.quantize(x)
    assert values.dtype == scales.dtype == torch.uint8
    assert values.shape == (*x.shape[:-1], form.value_bytes(x.shape[-1]))
    assert scales.shape == (*x.shape[:-1], form.scale_bytes(x.shape[-1]))
    return form.dequantize(values, scales, x.shape[-1])


def random_rows(head_dim: int) -> torch.Tensor:
    return torch.randn(3, 5, head_dim, generator=torch.Generator().manual_seed(head_dim))


def test_int8_is_steps_of_the_largest_over_127() -> None:
    x = torch.tensor([-127.0, 126.4, 2.5, 3.5, 0.4] + [0.0] * 11)
    assert there_and_back("int8", x).tolist() == [-127.0, 126.0, 2.0, 4.0, 0.0] + [0.0] * 11


def test_fp8_keeps_four_digits_of_what_the_largest_over_448_leaves() -> None:
    x = torch.tensor([448.0, -17.0, 19.0, 2.0**-9, 2.0**-10, -448.0])
    assert there_and_back("fp8", x).tolist() == [448.0, -16.0, 20.0, 2.0**-9, 0.0, -448.0]


def test_int4_is_fifteen_steps_from_the_lowest_of_each_group() -> None:
    x = torch.cat([torch.arange(32.0) % 16 - 4, torch.full((16,), 3.0)])
    assert torch.equal(there_and_back("int4", x), x)
    values, scales = RowForm("int4").quantize(x)
    assert values[:2].tolist() == [0x10, 0x32]  # the even dimension in the low half
    assert scales.view(torch.bfloat16).tolist() == [1.0, -4.0, 0.0, 3.0]  # scale and offset of each group


def test_channel4_is_fifteen_steps_from_the_lowest_of_each_dimension_over_a_block() -> None:
    form = RowForm("channel4")
    x = torch.stack([torch.arange(16.0), torch.full((16,), 3.0), 2 - torch.arange(16.0) * 100], dim=1)
    values, scales = form.quantize(x)
    assert (values.shape, scales.shape) == ((16, 2), (1, 12))
    assert values[:2].tolist() == [[0x00, 0x0F], [0x01, 0x0E]]  # the even dimension in the low half
    assert scales.view(torch.bfloat16).tolist() == [[1.0, 0.0, 0.0, 3.0, 100.5, -1504.0]]  # −1498, rounded down
    assert (form.dequantize(values, scales, 3) - x).abs().max() <= 6


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_a_dimension_loses_at_most_half_a_step_of_its_own_whatever_the_others_hold(size: float) -> None:
    x = (random_rows(64).repeat(1, 4, 1)[:, :16] * size * torch.logspace(-3, 3, 64)).bfloat16().float()
    form = RowForm("channel4")
    back = form.dequantize(*form.quantize(x), 64)
    step = (x.amax(dim=1, keepdim=True) - x.amin(dim=1, keepdim=True)) / 15
    assert ((back - x).abs() <= step * (0.5 + 15 * 2**-8)).all()


@pytest.mark.parametrize(
    ("name", "block_size", "share"),
    [("int8", 16, 0.54), ("fp8", 16, 0.54), ("k8v4", 16, 0.45), ("int4", 16, 0.38), ("int4", 32, 0.33)],
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_what_a_token_takes_beside_16_bits(name: str, block_size: int, share: float, head_dim: int) -> None:
    ratio = FORMS[name].block_bytes(block_size, head_dim) / FORMS["bf16"].block_bytes(block_size, head_dim)
    assert ratio <= share


@SIZES
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
def test_the_error_is_at_most_half_a_step(size: float, head_dim: int) -> None:
    x = random_rows(head_dim) * size
    largest = x.abs().amax(dim=-1, keepdim=True)
    rounding = 2**-9 + 1e-6  # of the scale, or of the values that it was rounded below
    assert ((there_and_back("int8", x) - x).abs() <= largest * (0.5 / 127 + rounding)).all()
    fp8 = (there_and_back("fp8", x) - x).abs()
    assert (fp8 <= (x.abs() * (2**-4 + rounding)).maximum(largest * (2**-10 / 448 * 1.01))).all()
    for group in range(0, head_dim, 32):
        part, back = x[..., group : group + 32], there_and_back("int4", x)[..., group : group + 32]
        offset_lost = part.amin(dim=-1).abs() * 2**-7  # the offset is rounded down
        width = part.amax(dim=-1) - part.amin(dim=-1) + offset_lost
        assert ((back - part).abs().amax(dim=-1) <= width / 15 * (0.5 + 15 * rounding)).all()


def test_a_group_far_from_zero_is_no_worse_for_it() -> None:
    x = 1000 + torch.linspace(0, 15, 32)
    assert (there_and_back("int4", x) - x).abs().max() < 0.8  # steps of 1 and the offset's rounding over 15 of them


@QUANTIZED
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_comes_back_as_nan_in_its_row_alone(name: str, bad: float) -> None:
    x = random_rows(64)
    x[1, 2, 40] = bad
    back = there_and_back(name, x)
    assert back[1, 2, 40].isnan()
    assert not back[1, 2].isinf().any()
    back[1, 2] = 0
    assert back.isfinite().all()


@QUANTIZED
def test_zeros_and_what_is_too_small_for_a_scale_are_zeros(name: str) -> None:
    x = torch.zeros(3, 48)
    x[1] = -0.0
    x[2, 7] = 1e-41
    assert (there_and_back(name, x).abs() <= 1e-40).all()


@QUANTIZED
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_rows_are_quantized_as_the_numbers_they_are(name: str, dtype: torch.dtype) -> None:
    x = random_rows(64).to(dtype)
    assert torch.equal(there_and_back(name, x), there_and_back(name, x.float()))


@pytest.mark.parametrize(
    ("name", "block_size", "head_dim", "keys", "values"),
    [
        ("float32", 16, 64, 4096, 4096),
        ("bf16", 16, 64, 2048, 2048),
        ("int8", 16, 64, 1088, 1088),  # 1056, to whole lines
        ("fp8", 32, 64, 2112, 2112),
        ("k8v4", 16, 64, 1088, 640),
        ("k8v4", 16, 80, 1344, 832),  # of values 40 bytes and three groups' scales a row
        ("int4", 16, 64, 768, 640),  # of keys a scale and an offset a dimension
        ("int4", 32, 64, 1280, 1280),
        ("int8", 1, 16, 64, 64),
    ],
)
def test_a_record_takes_values_and_scales_in_whole_cache_lines(name, block_size, head_dim, keys, values) -> None:
    form = FORMS[name]
    assert [form.record_bytes(plane, block_size, head_dim) for plane in range(2)] == [keys, values]
    assert form.block_bytes(block_size, head_dim) == keys + values


def test_every_float_dtype_has_its_form() -> None:
    assert [form_of(dtype).name for dtype in (torch.float32, torch.bfloat16, torch.float16)] == [
        "float32",
        "bf16",
        "fp16",
    ]
