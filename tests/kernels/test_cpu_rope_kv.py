"""Rotation, the KV write and the closing of blocks in C++ against the specification, on both code paths."""

from dataclasses import replace

import pytest
import torch

from pagedd.kernels import reference
from pagedd.kernels.kv_form import FORMS
from pagedd.kernels.layout import KVLayer, QuantizedLayer

from .attention_driver import EVERY_FORM, QUANTIZED, bytes_of


@pytest.mark.parametrize("has_norms", [False, True])
@EVERY_FORM
@pytest.mark.parametrize("head_dim", [16, 64, 80])
def test_rows_are_normalised_rotated_and_written(driver, form, head_dim, has_norms):
    generator = torch.Generator().manual_seed(head_dim)
    qkv = torch.randn(4, 9, head_dim, generator=generator)  # 5 query, 2 key and 2 value heads
    angles = torch.randn(4, head_dim // 2, generator=generator) * 100
    norms = [torch.randn(head_dim, generator=generator), torch.randn(head_dim, generator=generator)]
    slots = torch.tensor([11, 0, 5, 6])
    exact = qkv.clone()
    heads = exact[:, :5], exact[:, 5:7]
    for x, norm in zip(heads, norms, strict=True):
        if has_norms:
            x.copy_(reference.rms_norm(x, norm, 1e-6))
        reference.apply_rope(x, angles.cos(), angles.sin())

    kv_layer, expected = make_layer(form, head_dim), make_layer(form, head_dim)
    cos, sin = angles.cos(), angles.sin()
    driver.rope_and_write(qkv, 5, cos, sin, norms if has_norms else [None, None], slots, kv_layer)
    torch.testing.assert_close(qkv, exact, rtol=1e-5, atol=1e-5)
    reference.write_kv(qkv[:, 5:7], qkv[:, 7:], expected, slots, slots)
    assert have_same_bytes(kv_layer, expected)


def make_layer(form: str, head_dim: int) -> KVLayer:
    """Three blocks of four slots, two heads, full of sevens."""
    if form not in QUANTIZED:
        return torch.full((2, 3, 2, 4, head_dim), 7.0, dtype=FORMS[form].dtype)
    return QuantizedLayer.filled(FORMS[form], 3, 2, 4, head_dim, byte=7, num_pages=3)


def have_same_bytes(one: KVLayer, other: KVLayer) -> bool:
    return all(map(torch.equal, bytes_of(one), bytes_of(other)))


@pytest.mark.parametrize("form", QUANTIZED)
@pytest.mark.parametrize("head_dim", [16, 64, 80])
def test_any_row_is_quantized_as_specified_to_the_last_bit(driver, form, head_dim):
    generator = torch.Generator().manual_seed(head_dim)
    sizes = 10.0 ** torch.linspace(-40, 38, 200)[:, None, None]
    rows = torch.randn(200, 1, head_dim, generator=generator) * sizes
    few = torch.randint(-3, 4, (200, 1, head_dim), generator=generator) / 4 + 100  # ties, and a width below the offset
    special = torch.zeros(8, 1, head_dim)
    special[1] = -0.0
    special[2] = 3.0
    special[3] = -3.0
    special[4, :, 5] = float("nan")
    special[5, :, 15] = float("inf")
    special[6, :, 0] = float("-inf")
    special[7, :, ::2] = 3e38
    special[7, :, 1::2] = -3e38
    values = torch.cat([rows, few, -few, special])
    num_rows = len(values)
    qkv = torch.cat([values, values, values.flip(0)], dim=1)
    written = QuantizedLayer.filled(FORMS[form], num_rows, 1, 1, head_dim, byte=7, num_pages=num_rows)
    ones = torch.ones(num_rows, head_dim // 2)
    slots = torch.arange(num_rows)
    driver.rope_and_write(qkv, 1, ones, ones * 0, [None, None], slots, written)
    for plane, x in enumerate((qkv[:, 1], qkv[:, 2])):
        if FORMS[form].rows[plane].needs_whole_block:
            continue
        expected_values, expected_scales = FORMS[form].rows[plane].quantize(x)
        assert torch.equal(written.values(plane)[:, 0, 0], expected_values)
        assert torch.equal(written.scales(plane)[:, 0, 0], expected_scales)


@pytest.mark.parametrize("head_dim", [16, 64, 80])
@pytest.mark.parametrize("block_size", [16, 32])
def test_keys_of_full_blocks_are_quantized_as_specified_to_the_last_bit(driver, paged, block_size, head_dim):
    """Steps that fill no block, one, and several; numbers of every size, and some that are none."""
    lens = [(1, 40), (1, 64), (70, 70), (33, 96), (3, 33)]
    batch = paged(lens, block_size=block_size, head_dim=head_dim, form="int4")
    open_keys = batch.kv_layer.open_keys
    open_keys.mul_(10.0 ** torch.linspace(-38, 38, open_keys.shape[-1]))
    special = batch.open_tables[2, 0]
    open_keys[special, 0, 3, :6] = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 3e38])
    open_keys[special, 1, :, :2] = torch.tensor([0.0, -0.0])
    expected = replace(batch.kv_layer, planes=tuple(plane.clone() for plane in batch.kv_layer.planes))
    driver.close_blocks(batch.kv_layer, batch)
    reference.close_blocks(expected, batch)
    assert all(map(torch.equal, batch.kv_layer.planes, expected.planes))


def test_bfloat16_is_rounded_to_nearest_even(driver):
    values = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-8, 3.4e38, float("inf")])
    qkv = torch.zeros(1, 3, 16)
    qkv[0, 2, : len(values)] = values
    qkv[0, 2, 15] = float("nan")
    kv_layer = torch.zeros(2, 1, 1, 1, 16, dtype=torch.bfloat16)
    zeros = torch.zeros(1, 8)
    driver.rope_and_write(qkv, 1, zeros + 1, zeros, [None, None], torch.tensor([0]), kv_layer)
    assert torch.equal(kv_layer[1, 0, 0, 0, :15], qkv[0, 2, :15].to(torch.bfloat16))
    assert kv_layer[1, 0, 0, 0, 15].isnan()
