"""Products with quantized weights in Triton against float64 products with the same numbers."""

import pytest
import torch

from pagedd.kernels.packed_weight import PackedWeight, pack_nested_weight, pack_weight
from pagedd.kernels.triton import linear as op
from pagedd.kernels.triton.card import Card
from pagedd.kernels.triton.launch import launch_for
from pagedd.kernels.triton.linear import packed_linear

# Of the sum of the terms' sizes, which may cancel: rounding of y, and of the weight where it goes to the matrix units.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
BITS = pytest.mark.parametrize("bits", [4, 8])

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def make_weight(out_features: int, in_features: int, bits: int) -> tuple[PackedWeight, torch.Tensor]:
    """Packed, and as float64."""
    q = torch.randint(0, 2**bits, (out_features, in_features), dtype=torch.uint8)
    scale = (torch.rand(out_features, in_features // 32) / 2**bits).half()
    offset = torch.randn(out_features, in_features // 32).half()
    exact = q.double() * scale.double().repeat_interleave(32, 1) + offset.double().repeat_interleave(32, 1)
    return pack_weight(q, scale, offset, bits), exact


def expect_product(
    num_rows: int, out_features: int, in_features: int, bits: int, dtype: torch.dtype, *, has_bias: bool = False
) -> None:
    packed, exact = make_weight(out_features, in_features, bits)
    x = torch.randn(num_rows, in_features).to(dtype)
    bias = torch.randn(out_features).to(dtype) if has_bias else None
    y = packed_linear(x, packed, bias)
    expected = x.double() @ exact.T + (0 if bias is None else bias.double())
    assert y.dtype == dtype
    sizes = x.double().abs() @ exact.abs().T + (0 if bias is None else bias.double().abs())
    error = ((y.double() - expected).abs() / sizes).max()
    assert error < TOLERANCE[dtype], f"largest error {error:.1e} of the terms' sizes"


@BITS
@DTYPES
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 16, 17])
def test_any_number_of_rows_gives_the_product(num_rows: int, dtype: torch.dtype, bits: int) -> None:
    expect_product(num_rows, 40, 192, bits, dtype)


@BITS
@pytest.mark.parametrize("num_rows", [1, 7])
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 32), (9, 64), (70, 1056), (33, 576), (8, 4096)])
def test_sizes_need_not_fill_tiles(num_rows: int, out_features: int, in_features: int, bits: int) -> None:
    expect_product(num_rows, out_features, in_features, bits, torch.float32)


@DTYPES
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (8, 32), (8, 16)])
@pytest.mark.parametrize(("num_rows", "in_features"), [(1, 256), (2, 1280), (5, 768), (17, 256), (1, 8192), (7, 8192)])
def test_nested_scales_give_the_product(num_rows, in_features, bits, group, dtype) -> None:
    out_features = 21
    q = torch.randint(0, 2**bits, (out_features, in_features), dtype=torch.uint8)
    s, t = torch.randint(-128, 128, (2, out_features, in_features // group), dtype=torch.int8)
    d, m = (torch.rand(2, out_features, in_features // 256) / 1024).half()
    packed = pack_nested_weight(q, s, t, d, m, bits)
    scale = d.double().repeat_interleave(256 // group, 1) * s
    offset = m.double().repeat_interleave(256 // group, 1) * t
    exact = q * scale.repeat_interleave(group, 1) - offset.repeat_interleave(group, 1)
    torch.testing.assert_close(packed.dequantize().double(), exact, rtol=1e-6, atol=1e-6)
    x = torch.randn(num_rows, in_features).to(dtype)
    sizes = (
        x.double().abs() @ (scale.abs().repeat_interleave(group, 1) * q + offset.abs().repeat_interleave(group, 1)).T
    )
    error = ((packed_linear(x, packed, None).double() - x.double() @ exact.T).abs() / sizes).max()
    assert error < TOLERANCE[dtype], f"largest error {error:.1e} of the terms' sizes"


@BITS
@pytest.mark.parametrize("num_rows", [1, 7])
@pytest.mark.parametrize("in_features", [96, 8192])
def test_a_bias_is_added_once_whether_or_not_the_inputs_are_split(num_rows: int, in_features: int, bits: int) -> None:
    expect_product(num_rows, 24, in_features, bits, torch.float32, has_bias=True)


@pytest.mark.kernels
@BITS
@DTYPES
@pytest.mark.parametrize("num_rows", [1, 3, 8, 16, 31, 65, 130, 257])
@pytest.mark.parametrize(("out_features", "in_features"), [(576, 576), (192, 1536), (130, 3072)])
def test_the_shapes_of_small_models(
    num_rows: int, out_features: int, in_features: int, bits: int, dtype: torch.dtype
) -> None:
    expect_product(num_rows, out_features, in_features, bits, dtype, has_bias=num_rows % 2 == 1)


@BITS
def test_packing_puts_numbers_where_the_docstring_says(bits: int) -> None:
    q = torch.randint(0, 2**bits, (3, 64), dtype=torch.uint8)
    packed = pack_weight(q, torch.ones(3, 2).half(), torch.zeros(3, 2).half(), bits)
    unit = 4 * 32 // bits
    for out in range(3):
        for place in range(64):
            word = packed.words[out, place // unit * 4 + place % 4].item()
            assert word >> (place % unit // 4 * bits) & (2**bits - 1) == q[out, place]
    assert packed.num_bytes == 3 * 64 * bits // 8 + 3 * 2 * 4


def test_scales_at_the_ends_of_float16_are_taken_as_they_are() -> None:
    q = torch.randint(0, 16, (2, 64), dtype=torch.uint8)
    scale = torch.tensor([[6e-8, 4000.0], [0.0, -1.0]]).half()
    offset = torch.tensor([[-6e-8, -32000.0], [1.0, 65504.0]]).half()
    exact = q.double() * scale.double().repeat_interleave(32, 1) + offset.double().repeat_interleave(32, 1)
    for row in range(2):
        for inputs in (slice(0, 32), slice(32, 64)):
            x = torch.zeros(1, 64)
            x[0, inputs] = torch.rand(32)
            y = packed_linear(x, pack_weight(q, scale, offset, 4), None)[0, row]
            # Numbers and offsets of both signs all but cancel, so what is exact is the sum of their sizes.
            group = inputs.start // 32
            terms = q[row, inputs] * scale[row, group].double().abs() + offset[row, group].double().abs()
            size = float(x[0, inputs].double() @ terms)
            torch.testing.assert_close(y.double(), x[0].double() @ exact[row], rtol=0, atol=1e-6 * size)


def test_rows_of_a_view_are_read_where_they_lie() -> None:
    packed, exact = make_weight(16, 64, 4)
    wide = torch.full((3, 200), float("nan"))
    wide[:, 40:104] = torch.randn(3, 64)
    expected = (wide[:, 40:104].double() @ exact.T).float()
    torch.testing.assert_close(packed_linear(wide[:, 40:104], packed, None), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_rows", [1, 16])
def test_split_sums_are_the_same_in_every_run(num_rows: int) -> None:
    packed, _ = make_weight(16, 8192, 4)
    x = torch.randn(num_rows, 8192).bfloat16()
    assert torch.equal(packed_linear(x, packed, None), packed_linear(x, packed, None))


def test_inputs_are_split_until_each_processor_has_its_programs() -> None:
    launch = launch_for("linear.matrix", 90, rows=16, is_nested=0)
    assert launch.tiles["programs"] == 2
    assert launch.tiles["steps"] == 4
    card = Card(arch=90, num_processors=100)
    assert op._steps_per_split(card, launch, num_tiles=200, num_steps=32) == 32
    assert op._steps_per_split(card, launch, num_tiles=64, num_steps=32) == 8
    assert op._steps_per_split(card, launch, num_tiles=1, num_steps=32) == 4
    assert op._steps_per_split(card, launch, num_tiles=1, num_steps=3) == 3


def test_no_rows_are_no_work() -> None:
    packed, _ = make_weight(16, 64, 4)
    assert packed_linear(torch.empty(0, 64), packed, None).shape == (0, 16)


@pytest.mark.parametrize(
    ("bits", "in_features", "num_groups", "message"),
    [(5, 64, 2, "5 bits"), (4, 48, 1, "groups of 32"), (4, 64, 1, "32")],
)
def test_what_cannot_be_packed_is_refused(bits: int, in_features: int, num_groups: int, message: str) -> None:
    scale = torch.ones(2, num_groups).half()
    with pytest.raises(ValueError, match=message):
        pack_weight(torch.zeros(2, in_features, dtype=torch.uint8), scale, scale, bits)
