"""Rope and the writing of keys and values in Triton against the specification."""

from dataclasses import replace

import pytest
import torch

from pagedd.kernels import reference
from pagedd.kernels.kv_form import FORMS
from pagedd.kernels.layout import KVLayer, QuantizedLayer, planes_of
from pagedd.kernels.triton.rope_kv import rope_and_write_kv, write_kv

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def angles(num_tokens: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    radians = torch.randn(num_tokens, head_dim // 2) * 100
    return radians.cos(), radians.sin()


def empty_layer(form: str, num_kv_heads: int, block_size: int, head_dim: int, num_blocks: int = 4) -> KVLayer:
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    if FORMS[form].dtype is not None:
        return torch.full((2, *shape), float("nan"), dtype=FORMS[form].dtype)
    return QuantizedLayer.filled(FORMS[form], *shape, byte=0xAA, num_pages=num_blocks)


def have_same_bytes(one: KVLayer, other: KVLayer) -> bool:
    return all(map(torch.equal, bytes_of(one), bytes_of(other)))


def bytes_of(kv_layer: KVLayer) -> list[torch.Tensor]:
    parts = list(planes_of(kv_layer))
    if isinstance(kv_layer, QuantizedLayer):
        parts.append(kv_layer.open_keys)
    return [part.view(torch.uint8) for part in parts]


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotates `x` in place as a query, beside a key that nobody wants."""
    key = torch.zeros(len(x), 1, x.shape[-1], dtype=x.dtype)
    unwanted = empty_layer("float32", 1, len(x), x.shape[-1])
    rope_and_write_kv(x, key, key, cos, sin, unwanted, torch.arange(len(x)))


def expect_apart_and_fused_equal(
    form: str, dtype: torch.dtype, *, block_size: int, head_dim: int, num_heads: int, num_kv_heads: int, num_tokens: int
) -> None:
    heads = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim).to(dtype)
    query, key, value = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)  # views into wider rows
    cos, sin = angles(num_tokens, head_dim)
    slots = torch.randperm(4 * block_size)[:num_tokens]
    fused = empty_layer(form, num_kv_heads, block_size, head_dim)
    apart = empty_layer(form, num_kv_heads, block_size, head_dim)
    turned_query, turned_key = query.clone(), key.clone()
    turn(turned_query, cos, sin)
    turn(turned_key, cos, sin)
    reference.write_kv(turned_key, value, apart, slots, slots)
    before = key.clone(), value.clone()

    rope_and_write_kv(query, key, value, cos, sin, fused, slots, slots)

    assert torch.equal(query, turned_query)
    assert have_same_bytes(fused, apart)
    assert torch.equal(key, before[0])
    assert torch.equal(value, before[1])


@DTYPES
@pytest.mark.parametrize("head_dim", [2, 64, 80, 96, 128, 256])
def test_rope_turns_a_view_in_place_as_the_reference_does(dtype: torch.dtype, head_dim: int) -> None:
    rows = torch.randn(2, 11, head_dim).to(dtype)
    cos, sin = angles(2, head_dim)
    expected = rows.clone()
    reference.apply_rope(expected[:, 1:10], cos, sin)
    turn(rows[:, 1:10], cos, sin)
    close(rows, expected)
    assert torch.equal(rows[:, [0, 10]], expected[:, [0, 10]])


@pytest.mark.parametrize("form", list(FORMS))
@DTYPES
def test_write_kv_equals_the_reference(dtype: torch.dtype, form: str) -> None:
    qkv = torch.randn(4, 7, 64).to(dtype)
    key, value = qkv[:, 3:5], qkv[:, 5:7]
    slots = torch.tensor([11, 0, 25, 6])
    written, expected = empty_layer(form, 2, 8, 64), empty_layer(form, 2, 8, 64)
    write_kv(key, value, written, slots, slots)
    reference.write_kv(key, value, expected, slots, slots)
    assert have_same_bytes(written, expected)


@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (9, 3), (16, 4), (8, 1)])
def test_fused_is_rope_and_then_writing_to_the_last_bit(form: str, num_heads: int, num_kv_heads: int) -> None:
    expect_apart_and_fused_equal(
        form,
        torch.bfloat16,
        block_size=8,
        head_dim=64,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        num_tokens=3,
    )


@pytest.mark.kernels
@pytest.mark.parametrize("form", list(FORMS))
@DTYPES
@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("ratio", [1, 3, 4, 8])
def test_fused_is_rope_and_then_writing_over_all_shapes(
    form: str, dtype: torch.dtype, block_size: int, head_dim: int, ratio: int
) -> None:
    expect_apart_and_fused_equal(
        form, dtype, block_size=block_size, head_dim=head_dim, num_heads=3 * ratio, num_kv_heads=3, num_tokens=5
    )


@pytest.mark.parametrize("form", list(FORMS))
def test_rows_of_padding_that_share_a_slot_change_nobody_elses(form: str) -> None:
    key, value = torch.randn(2, 5, 2, 64)
    slots = torch.tensor([3, 40, 17, 63, 63])  # the last two are padding, in the last block
    crowded, alone = (empty_layer(form, 2, 16, 64) for _ in range(2))
    write_kv(key, value, crowded, slots, slots)
    write_kv(key[:3], value[:3], alone, slots[:3], slots[:3])
    for padded, wanted in zip(bytes_of(crowded), bytes_of(alone), strict=True):
        assert torch.equal(padded[:3], wanted[:3])


@pytest.mark.parametrize("form", ["bf16", "int8", "k8v4"])
def test_slots_further_into_the_pool_than_32_bits_count_are_found(form: str) -> None:
    """Memory is taken by the pages that are written, of a pool of more than 4 GiB a plane."""
    head_dim, block_size, num_kv_heads = 64, 16, 1
    kv_form = FORMS[form]
    records = [kv_form.record_bytes(plane, block_size, head_dim) for plane in range(2)]
    num_blocks = 2**32 // min(records) + 8
    size = num_blocks * sum(records)
    data = torch.tensor([], dtype=torch.uint8).set_(torch.UntypedStorage(size), 0, (size,))
    kv_layer: KVLayer
    if kv_form.dtype is None:
        keys, values = data.split([num_blocks * record for record in records])
        planes = keys.view(num_blocks, 1, -1), values.view(num_blocks, 1, -1)
        kv_layer = replace(empty_layer(form, num_kv_heads, block_size, head_dim), planes=planes)
    else:
        kv_layer = data.view(kv_form.dtype).view(2, num_blocks, num_kv_heads, block_size, head_dim)
    key, value = torch.randn(2, 1, num_kv_heads, head_dim)
    last = num_blocks - 1
    write_kv(key, value, kv_layer, torch.tensor([last * block_size + 3]))
    small = empty_layer(form, num_kv_heads, block_size, head_dim, num_blocks=1)
    reference.write_kv(key, value, small, torch.tensor([3]))
    for plane in range(2):
        if isinstance(kv_layer, QuantizedLayer) and isinstance(small, QuantizedLayer):
            assert torch.equal(kv_layer.values(plane)[last, :, 3], small.values(plane)[0, :, 3])
            assert torch.equal(kv_layer.scales(plane)[last, :, 3], small.scales(plane)[0, :, 3])
        else:
            assert torch.equal(planes_of(kv_layer)[plane][last, :, 3], planes_of(small)[plane][0, :, 3])


def test_no_tokens_are_no_work() -> None:
    nothing = torch.empty(0, 2, 64)
    kv_layer = torch.full((2, 1, 2, 16, 64), 7.0)
    rope_and_write_kv(nothing, nothing, nothing, torch.empty(0, 32), torch.empty(0, 32), kv_layer, torch.empty(0))
    assert bool((kv_layer == 7).all())
