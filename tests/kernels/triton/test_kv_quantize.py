"""What is written into the cache, against `kv_form.py`, to the last bit."""

import pytest
import torch

from pagedd.kernels.kv_form import FORMS
from pagedd.kernels.layout import KVLayer, QuantizedLayer, planes_of
from pagedd.kernels.triton.rope_kv import write_kv

QUANTIZED = ["int8", "fp8", "k8v4", "int4"]
NUM_BLOCKS, NUM_KV_HEADS = 3, 3


def empty_layer(form: str, *, block_size: int = 16, head_dim: int = 64) -> KVLayer:
    """A float cache of NaN, or records of 0xAA."""
    shape = (NUM_BLOCKS, NUM_KV_HEADS, block_size, head_dim)
    if FORMS[form].dtype is not None:
        return torch.full((2, *shape), float("nan"), dtype=FORMS[form].dtype)
    return QuantizedLayer.filled(FORMS[form], *shape, byte=0xAA, num_pages=NUM_BLOCKS)


def have_same_bytes(one: KVLayer, other: KVLayer) -> bool:
    return all(map(torch.equal, bytes_of(one), bytes_of(other)))


def bytes_of(kv_layer: KVLayer) -> list[torch.Tensor]:
    parts = list(planes_of(kv_layer))
    if isinstance(kv_layer, QuantizedLayer):
        parts.append(kv_layer.open_keys)
    return [part.view(torch.uint8) for part in parts]


def expect_same_bytes(rows: torch.Tensor, form: str) -> None:
    """`rows`, [n, head_dim], as keys of as many tokens; their reverse as values."""
    block_size, head_dim = 16, rows.shape[-1]
    tokens = rows[: len(rows) // NUM_KV_HEADS * NUM_KV_HEADS].view(-1, NUM_KV_HEADS, head_dim)
    tokens = tokens[: NUM_BLOCKS * block_size]
    slots = torch.randperm(NUM_BLOCKS * block_size)[: len(tokens)]
    written, expected = (empty_layer(form, block_size=block_size, head_dim=head_dim) for _ in range(2))
    write_kv(tokens, tokens.flip(0), written, slots, slots)
    blocks, offsets = slots // block_size, slots % block_size
    for plane, x in enumerate((tokens, tokens.flip(0))):
        if isinstance(expected, QuantizedLayer) and expected.form.rows[plane].needs_whole_block:
            expected.open_keys[blocks, :, offsets] = x.bfloat16()
        elif isinstance(expected, QuantizedLayer):
            expected.write(plane, blocks, offsets, x)
        else:
            expected[plane][blocks, :, offsets] = x.to(expected.dtype)
    assert have_same_bytes(written, expected)


@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_random_rows_of_any_size_of_numbers(form: str, dtype: torch.dtype) -> None:
    sizes = torch.logspace(-30, 30, 60)[:, None] if dtype != torch.float16 else torch.logspace(-7, 4, 60)[:, None]
    expect_same_bytes((torch.randn(60, 64) * sizes).to(dtype), form)


@pytest.mark.parametrize("form", QUANTIZED)
@pytest.mark.parametrize("head_dim", [8, 40, 80, 96, 128, 256])
def test_heads_of_other_sizes(form: str, head_dim: int) -> None:
    expect_same_bytes(torch.randn(15, head_dim) + torch.randn(15, 1), form)


@pytest.mark.parametrize("form", QUANTIZED)
def test_values_halfway_between_two_steps_go_to_the_even_one(form: str) -> None:
    rows = torch.arange(30 * 64).view(30, 64).float() % 255 - 127
    rows[:, 0] = 127 if form == "int8" else 448
    expect_same_bytes(rows / 2, form)


def test_every_number_that_e4m3_has_and_every_midpoint_between_two_is_rounded_as_torch_does() -> None:
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    between = (numbers[1:] + numbers[:-1]) / 2
    points = torch.cat([numbers, between, between.nextafter(torch.tensor(0.0)), between.nextafter(torch.tensor(1e9))])
    points = torch.cat([points, -points])
    rows = torch.zeros(-(-len(points) // 60), 64)
    rows[:, :60] = torch.nn.functional.pad(points, (0, rows.shape[0] * 60 - len(points))).view(-1, 60)
    rows[:, 63] = 448  # a scale of 1
    expect_same_bytes(rows, "fp8")


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")  # of numpy, on what becomes NaN
@pytest.mark.parametrize("form", list(FORMS))
def test_nan_infinity_zeros_and_the_smallest_and_largest_numbers(form: str) -> None:
    rows = torch.randn(33, 64)
    tiny, huge = torch.finfo(torch.float32).smallest_normal, torch.finfo(torch.float32).max
    specials = [0.0, -0.0, float("nan"), float("inf"), float("-inf"), tiny, -tiny / 8, 15 * tiny, huge, -huge]
    for i, special in enumerate(specials):
        rows[i, 40] = special  # amid others: int4 spoils one group only
        rows[i + len(specials)] = special  # the whole row
    rows[30, :2] = torch.tensor([huge, -huge])  # a range that is no float32
    rows[31] = torch.linspace(-1e-45, 1e-44, 64)
    if FORMS[form].dtype is None and not FORMS[form].has_open_keys:
        expect_same_bytes(rows, form)
    else:
        # Which NaN is written is the hardware's choice.
        expect_same_bytes(rows.nan_to_num(0.5, float("inf"), float("-inf")), form)
