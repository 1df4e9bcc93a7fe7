"""The vectorised backend against the specification."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagedd.kernels import attention_plan, reference, torch_ops
from pagedd.kernels.row_form import RowForm

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@DTYPES
@pytest.mark.parametrize("size", [1, 64, 80, 576])
def test_rms_norm_equals_the_reference(dtype: torch.dtype, size: int) -> None:
    x, weight = torch.randn(5, size).to(dtype), torch.randn(size).to(dtype)
    close(torch_ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


@DTYPES
def test_add_rms_norm_equals_the_reference(dtype: torch.dtype) -> None:
    x, residual, weight = torch.randn(3, 40).to(dtype), torch.randn(3, 40).to(dtype), torch.randn(40).to(dtype)
    y, total = torch_ops.add_rms_norm(x, residual, weight, 1e-6)
    expected, expected_total = reference.add_rms_norm(x, residual, weight, 1e-6)
    close(y, expected)
    assert torch.equal(total, expected_total)


@DTYPES
@pytest.mark.parametrize("head_dim", [2, 64, 80])
def test_rope_turns_a_view_in_place_as_the_reference_does(dtype: torch.dtype, head_dim: int) -> None:
    rows = torch.randn(3, 5, head_dim).to(dtype)
    angles = torch.randn(3, head_dim // 2) * 100
    expected = rows.clone()
    reference.apply_rope(expected[:, 1:3], angles.cos(), angles.sin())
    torch_ops.apply_rope(rows[:, 1:3], angles.cos(), angles.sin())
    close(rows, expected)


@DTYPES
def test_silu_and_mul_equals_the_reference_and_leaves_its_input(dtype: torch.dtype) -> None:
    x = torch.randn(3, 2 * 40).to(dtype)
    before = x.clone()
    close(torch_ops.silu_and_mul(x), reference.silu_and_mul(x))
    assert torch.equal(x, before)


@DTYPES
def test_write_kv_equals_the_reference(dtype: torch.dtype) -> None:
    qkv = torch.randn(4, 7, 8).to(dtype)
    key, value = qkv[:, 3:5], qkv[:, 5:7]  # views into wider rows, as the decoder has them
    slots = torch.tensor([11, 0, 5, 6])
    written, expected = torch.zeros(2, 2, 3, 2, 4, 8, dtype=dtype)
    torch_ops.write_kv(key, value, written, slots)
    reference.write_kv(key, value, expected, slots)
    assert torch.equal(written, expected)


def attend_both(batch, **options) -> tuple[torch.Tensor, torch.Tensor]:
    scale = batch.query.shape[-1] ** -0.5
    return (
        torch_ops.paged_attention(batch.query, batch.kv_layer, batch, scale=scale, **options),
        reference.paged_attention(batch.query, batch.kv_layer, batch, scale=scale, **options),
    )


@DTYPES
@pytest.mark.parametrize("options", [{}, {"sliding_window": 5}, {"soft_cap": 2.0}], ids=str)
@pytest.mark.parametrize(
    "lens",
    [
        [(1, 1)],
        [(1, 9)],
        [(1, 33), (1, 5), (1, 4), (1, 1), (1, 16)],
        [(7, 7)],
        [(4, 13)],
        [(1, 9), (1, 4), (7, 7), (3, 20), (16, 16), (2, 17)],
    ],
    ids=["one token", "a lone decode", "decodes", "a prompt", "a later chunk", "all together"],
)
def test_attention_equals_the_reference(paged, dtype, options, lens) -> None:
    close(*attend_both(paged(lens, dtype=dtype), **options))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (3, 1), (9, 3), (8, 2), (5, 5)])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_attention_shares_kv_heads_at_any_ratio(paged, num_heads, num_kv_heads, head_dim) -> None:
    batch = paged([(1, 6), (5, 9)], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    close(*attend_both(batch))


@pytest.mark.parametrize("window", [1, 3, 4, 8, 29, 30, 31])
def test_a_window_is_exact_wherever_it_ends(paged, window) -> None:
    close(*attend_both(paged([(1, 30), (1, 7), (6, 30), (9, 9)]), sliding_window=window))


def test_a_chunk_longer_than_a_tile_is_exact(paged, monkeypatch) -> None:
    monkeypatch.setattr(attention_plan, "TILE_ROWS", 4)
    close(*attend_both(paged([(10, 17), (4, 4)])))
    close(*attend_both(paged([(10, 17), (9, 9)]), sliding_window=6))


def test_groups_close_at_the_padding_limit(monkeypatch) -> None:
    monkeypatch.setattr(attention_plan, "MAX_PADDED_SLOTS", 10)
    # 16 pads itself by 0, 12 by 4, 10 by 6 (10 in all); 9 would make it 17 and starts a group padded to 12 slots.
    assert attention_plan._group_by_length([10, 16, 9, 12], block_size=4) == [[1, 3, 0], [2]]


def test_groups_close_at_the_gathering_limit(monkeypatch) -> None:
    monkeypatch.setattr(attention_plan, "MAX_GATHERED_SLOTS", 32)
    assert attention_plan._group_by_length([16, 16, 16], block_size=4) == [[0, 1], [2]]


def test_what_an_earlier_owner_left_in_a_block_reaches_nobody(paged) -> None:
    # `paged` fills every unwritten slot with NaN; sequences of 1 and 3 are padded far past their only block.
    batch = paged([(1, 40), (1, 3), (1, 1), (3, 5)])
    y, expected = attend_both(batch)
    assert y.isfinite().all()
    close(y, expected)


def test_one_sequences_nan_stays_its_own(paged) -> None:
    batch = paged([(1, 9), (1, 4), (2, 6)])
    batch.kv_layer[:, int(batch.block_tables[0, 0])] = float("nan")
    y = torch_ops.paged_attention(batch.query, batch.kv_layer, batch, scale=1.0)
    assert y[0].isnan().any()
    assert y[1:].isfinite().all()


def test_offsets_past_two_to_the_31st_are_right(paged) -> None:
    small = paged([(1, 6), (5, 9)], block_size=16, num_kv_heads=1, num_heads=1, head_dim=64)
    num_blocks = 2**31 // (16 * 64) + 100  # pages that nobody touches cost nothing
    large = torch.empty(2, num_blocks, 1, 16, 64, dtype=torch.bfloat16)
    query = small.query.bfloat16()
    close_to = torch_ops.paged_attention(query, small.kv_layer.bfloat16(), small, scale=0.1)
    shift = num_blocks - small.kv_layer.shape[1]
    large[:, shift:] = small.kv_layer.bfloat16()
    small.block_tables.add_(shift)
    moved = paged([(1, 6), (5, 9)], block_size=16, num_kv_heads=1, num_heads=1, head_dim=64)
    moved.block_tables.copy_(small.block_tables)
    assert torch.equal(torch_ops.paged_attention(query, large, moved, scale=0.1), close_to)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    decodes=st.lists(st.integers(1, 40), max_size=5),
    chunks=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 20)), max_size=3),
    block_size=st.sampled_from([1, 3, 8]),
    window=st.none() | st.integers(1, 45),
    soft_cap=st.none() | st.just(1.5),
    group=st.sampled_from([1, 3]),
    seed=st.integers(0, 1000),
)
def test_any_batch_equals_the_reference(paged, decodes, chunks, block_size, window, soft_cap, group, seed) -> None:
    lens = [(1, c) for c in decodes] + [(q, q + cached) for q, cached in chunks]
    if lens:
        batch = paged(lens, block_size=block_size, num_heads=2 * group, num_kv_heads=2, head_dim=4, seed=seed)
        close(*attend_both(batch, sliding_window=window, soft_cap=soft_cap))


FORMS = pytest.mark.parametrize("form", ["int8", "fp8", "k8v4", "int4"])


@FORMS
@pytest.mark.parametrize(("block_size", "head_dim"), [(4, 8), (8, 80), (1, 16)], ids=str)
def test_quantized_rows_are_written_as_the_reference_writes_them(paged, form, block_size, head_dim) -> None:
    qkv = torch.randn(4, 7, head_dim)
    layer, expected = (paged([(9, 9)], block_size=block_size, head_dim=head_dim, form=form).kv_layer for _ in range(2))
    slots = torch.tensor([3, 0, 2, 1])
    torch_ops.write_kv(qkv[:, 3:5], qkv[:, 5:7], layer, slots, slots)
    reference.write_kv(qkv[:, 3:5], qkv[:, 5:7], expected, slots, slots)
    assert all(map(torch.equal, layer.planes, expected.planes))
    assert torch.equal(layer.open_keys.view(torch.int16), expected.open_keys.view(torch.int16))


def test_keys_of_full_blocks_are_quantized_as_the_reference_does_it(paged) -> None:
    lens = [(1, 40), (1, 64), (70, 70), (33, 96), (3, 33), (1, 1)]
    layer, expected = (paged(lens, block_size=16, form="int4") for _ in range(2))
    torch_ops.close_blocks(layer.kv_layer, layer)
    reference.close_blocks(expected.kv_layer, expected)
    assert all(map(torch.equal, layer.kv_layer.planes, expected.kv_layer.planes))


@FORMS
@pytest.mark.parametrize("options", [{}, {"sliding_window": 5}, {"soft_cap": 1.5}], ids=str)
def test_attention_over_a_quantized_cache_equals_the_reference(paged, form, options) -> None:
    for head_dim in (8, 80):
        batch = paged([(1, 40), (1, 3), (1, 1), (5, 12), (3, 3)], head_dim=head_dim, form=form)
        y, expected = attend_both(batch, **options)
        assert y.isfinite().all()
        close(y, expected)


@FORMS
def test_products_over_a_quantized_cache_are_taken_in_the_querys_dtype(paged, form) -> None:
    batch = paged([(1, 20), (4, 9)], form=form)
    query = batch.query.bfloat16()
    close(
        torch_ops.paged_attention(query, batch.kv_layer, batch, scale=0.5),
        reference.paged_attention(query, batch.kv_layer, batch, scale=0.5),
    )


def test_only_the_gathered_blocks_are_dequantized(paged, monkeypatch) -> None:
    monkeypatch.setattr(attention_plan, "MAX_GATHERED_SLOTS", 32)
    batch = paged([(1, 16)] * 4, block_size=4, num_kv_heads=2, form="int8")
    seen = []
    dequantize = RowForm.dequantize
    monkeypatch.setattr(
        RowForm, "dequantize", lambda self, values, *rest: seen.append(len(values)) or dequantize(self, values, *rest)
    )
    torch_ops.paged_attention(batch.query, batch.kv_layer, batch, scale=1.0)
    assert seen == [2 * 4 * 2] * 4  # two sequences of four blocks and two heads: keys, values, and the other two's


def test_a_quantized_layers_parts_are_views_of_it(paged) -> None:
    layer = paged([(1, 9)], form="k8v4", head_dim=80).kv_layer
    for plane, value_bytes, scale_bytes in ((0, 80, 2), (1, 40, 12)):
        records = layer.planes[plane]
        assert layer.values(plane).data_ptr() == records.data_ptr()
        assert layer.scales(plane).data_ptr() == records.data_ptr() + 4 * value_bytes
        assert layer.scales(plane).shape == (*records.shape[:2], 4, scale_bytes)
