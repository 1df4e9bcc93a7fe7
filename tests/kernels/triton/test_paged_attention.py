"""Attention in one launch against the specification: mixed batches, every form of the cache, and what must not leak."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from triton.runtime import interpreter

from pagedd.kernels import reference
from pagedd.kernels.kv_form import FORMS
from pagedd.kernels.layout import QuantizedLayer, planes_of
from pagedd.kernels.triton import paged_attention, split_decode
from pagedd.kernels.triton.attention_shape import llama_8b
from pagedd.kernels.triton.paged_attention import paged_attention as attend

# Of numbers around 1: weights and outputs are rounded to the dtype of products once each.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}

MIXED = [(1, 9), (1, 41), (7, 7), (3, 20), (33, 50), (2, 17)]
DECODES = [(1, 33), (1, 5), (1, 16), (1, 1), (1, 64)]

# Block size, head size, group: each value once.
SHAPES = [(8, 64, 1), (16, 80, 3), (32, 96, 4), (16, 128, 8), (8, 256, 4)]
ALL_SHAPES = list(product((8, 16, 32), (64, 80, 96, 128, 256), (1, 3, 4, 8)))


def check(batch: Any, **options: Any) -> torch.Tensor:
    """Holds the kernel to the specification, and returns what it computed."""
    scale = batch.query.shape[-1] ** -0.5
    y = attend(batch.query, batch.kv_layer, batch, scale=scale, **options)
    # As float64, so that the specification rounds nothing.
    expected = reference.paged_attention(batch.query.double(), batch.kv_layer, batch, scale=scale, **options)
    assert y.dtype == batch.query.dtype
    layer = batch.kv_layer
    products = batch.query.dtype if isinstance(layer, QuantizedLayer) else layer.dtype
    tolerance = max(TOLERANCE[batch.query.dtype], TOLERANCE[products])
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)
    return y


@pytest.fixture
def make(paged: Callable[..., Any], poisoned_memory: None) -> Callable[..., Any]:
    """Batches whose unwritten slots hold NaN, while outputs begin as NaN."""

    def make(lens: list[tuple[int, int]], shape: tuple[int, int, int] = (16, 64, 2), **options: Any) -> Any:
        block_size, head_dim, group = shape
        return paged(lens, block_size=block_size, num_heads=2 * group, num_kv_heads=2, head_dim=head_dim, **options)

    return make


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_a_mixed_batch_equals_the_reference(make, shape, form) -> None:
    check(make([(1, 9), (1, 33), (7, 7), (3, 20)], shape, form=form))


@pytest.mark.parametrize("group", [33, 71])
def test_many_heads_may_share_a_kv_head(make, group) -> None:
    check(make([(1, 9), (1, 33), (5, 20)], (16, 64, group)))


@pytest.mark.kernels
@pytest.mark.parametrize("shape", ALL_SHAPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_every_shape_and_form_equals_the_reference(make, shape, form) -> None:
    check(make(MIXED, shape, form=form))
    check(make(DECODES, shape, form=form), sliding_window=19, soft_cap=3.0)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 5}, {"soft_cap": 2.0}], ids=str)
@pytest.mark.parametrize(
    "lens",
    [[(1, 1)], [(1, 33)], DECODES, [(7, 7)], [(4, 29)], [(70, 70)], MIXED],
    ids=["one token", "a lone decode", "decodes", "a prompt", "a later chunk", "several tiles", "all together"],
)
def test_every_kind_of_batch_equals_the_reference(make, lens, options) -> None:
    check(make(lens), **options)


@pytest.mark.parametrize("window", [1, 15, 16, 17, 40, 41, 42])
def test_a_window_is_exact_wherever_it_ends(make, window) -> None:
    check(make([(1, 41), (1, 7), (20, 41), (9, 9)]), sliding_window=window)


def test_a_few_guesses_of_each_sequence_are_one_tile_each(make, monkeypatch) -> None:
    monkeypatch.setattr(paged_attention, "_find_tile", None)  # only tiles of chunks are looked up
    check(make([(1, 9), (4, 20), (3, 3), (8, 70)]))


def test_chunks_of_any_lengths_find_their_tiles(make) -> None:
    # 64 queries a tile: some sequences end just before, at and after the end of one.
    check(make([(1, 3), (63, 63), (64, 64), (65, 70), (1, 2), (2, 2), (17, 17)], (16, 64, 2)))


def test_a_padded_sequence_without_rows_or_keys_is_left_out(make) -> None:
    batch = make([(1, 9), (1, 20), (1, 1)])
    query_starts, context_lens = batch.query_starts.clone(), batch.context_lens.clone()
    query_starts[3], context_lens[2] = 2, 0  # the last sequence has no row
    y = attend(batch.query, batch.kv_layer, replace(batch, query_starts=query_starts), scale=1.0)
    assert torch.equal(y[:2], attend(batch.query, batch.kv_layer, batch, scale=1.0)[:2])
    assert y[2].isnan().all()
    y = attend(batch.query, batch.kv_layer, replace(batch, context_lens=context_lens), scale=1.0)
    assert torch.equal(y[2], torch.zeros_like(y[2]))  # a row that sees no key


def test_no_rows_are_no_work(make) -> None:
    batch = make([(1, 9)])
    empty = replace(
        batch, query_starts=batch.query_starts[:1], context_lens=batch.context_lens[:0], num_decodes=0, max_query_len=0
    )
    assert attend(batch.query[:0], batch.kv_layer, empty, scale=1.0).shape == (0, *batch.query.shape[1:])


@pytest.mark.parametrize("form", ["float32", "int8", "int4"])
def test_what_an_earlier_owner_left_in_a_block_reaches_nobody(make, form) -> None:
    assert check(make([(1, 40), (1, 3), (1, 1), (3, 5), (40, 47)], form=form)).isfinite().all()


def test_entries_past_a_sequences_last_block_are_not_followed(make) -> None:
    batch = make([(1, 40), (1, 3), (3, 5), (20, 36)])
    for i, context_len in enumerate(batch.context_lens.tolist()):
        batch.block_tables[i, -(-context_len // 16) :] = 2**31 - 1
    check(batch)


def test_one_sequences_nan_stays_its_own(make) -> None:
    batch = make([(1, 9), (1, 4), (2, 6), (40, 40)])
    batch.kv_layer[:, int(batch.block_tables[0, 0])] = float("nan")
    y = attend(batch.query, batch.kv_layer, batch, scale=1.0)
    assert y[0].isnan().all()
    assert y[1:].isfinite().all()


@pytest.mark.parametrize("form", ["int8", "fp8", "k8v4", "int4"])
def test_a_row_that_was_not_finite_never_reads_as_plausible_numbers(make, form) -> None:
    batch = make([(1, 20), (1, 20)], form=form)
    layer, block = batch.kv_layer, int(batch.block_tables[0, 0])
    if form == "int4":
        infinite = torch.full((1, 2, 16, 64), float("inf"), dtype=torch.bfloat16)
        layer.open_keys[:1] = infinite
        values, scales = layer.form.rows[0].quantize(infinite)
        layer.values(0)[block, 0], layer.scales(0)[block, 0] = values[0, 0], scales[0, 0]
    else:
        values, scales = layer.form.rows[0].quantize(torch.full((64,), float("inf")))
        layer.values(0)[block, 0, 3], layer.scales(0)[block, 0, 3] = values, scales
    y = attend(batch.query, layer, batch, scale=1.0)
    assert y[0, :2].isnan().all()
    assert y[0, 2:].isfinite().all()
    assert y[1].isfinite().all()


@pytest.mark.parametrize("head_dim", [64, 80, 256])
@pytest.mark.parametrize("form", ["int8", "fp8", "k8v4", "int4"])
def test_a_lone_keys_value_comes_out_to_the_last_bit(make, form, head_dim) -> None:
    batch = make([(1, 1), (1, 1)], (8, head_dim, 1), form=form)
    layer = batch.kv_layer
    for plane in range(2):
        values, scales = layer.values(plane), layer.scales(plane)
        numbers = torch.arange(values.numel()).to(torch.uint8).view_as(values)
        if form == "fp8":
            numbers[(numbers & 0x7F) == 0x7F] = 0  # NaN, which is never written
        values.copy_(numbers)
        pair = torch.tensor([0.0078125, -3.0]).bfloat16().view(torch.uint8)  # of int4 a scale and an offset
        scales.copy_(pair.repeat(head_dim)[: scales.shape[-1]])
    expected = layer.dequantize(1)[batch.block_tables[:, 0].long(), :, 0]
    assert torch.equal(attend(batch.query, layer, batch, scale=0.0), expected)


@pytest.mark.parametrize("size", [1e-4, 1.0, 6e3])
@pytest.mark.parametrize("form", ["int8", "fp8", "k8v4", "int4"])
def test_a_quantized_cache_keeps_float16s_range(make, form, size) -> None:
    batch = make([(1, 40), (20, 33)], form=form)
    layer = batch.kv_layer
    values, scales = layer.form.rows[1].quantize(layer.dequantize(1) * size)
    layer.values(1).copy_(values)
    layer.scales(1).copy_(scales)
    query = batch.query.half()
    y = attend(query, layer, batch, scale=0.125)
    expected = reference.paged_attention(query.double(), layer, batch, scale=0.125)
    torch.testing.assert_close(y.double() / size, expected / size, rtol=0, atol=3e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", ["float32", "int8", "fp8", "int4"])
def test_queries_may_have_a_dtype_of_their_own(make, form, dtype) -> None:
    batch = make(MIXED, form=form)
    check(replace(batch, query=batch.query.to(dtype)))


def test_queries_may_lie_in_wider_rows(make) -> None:
    batch = make(MIXED)
    rows = torch.full((batch.query.shape[0], 7, 64), float("nan"))
    rows[:, 1:5] = batch.query
    assert torch.equal(check(replace(batch, query=rows[:, 1:5])), check(batch))


def test_tensors_that_lie_otherwise_are_refused(make) -> None:
    batch = make([(1, 9)])
    with pytest.raises(ValueError, match="heads of a row"):
        attend(batch.query.expand(2, -1, -1).transpose(0, 1), batch.kv_layer, batch, scale=1.0)
    with pytest.raises(ValueError, match="keys of a layer"):
        attend(batch.query, batch.kv_layer.transpose(2, 3), batch, scale=1.0)


def test_nothing_is_asked_of_the_device(make, monkeypatch) -> None:
    # A captured launch cannot wait for an answer.
    batch = make(MIXED)
    for question in ("item", "tolist", "cpu", "nonzero", "__int__", "__bool__", "__index__"):
        monkeypatch.setattr(torch.Tensor, question, lambda *_: pytest.fail("a question to the device"))
    attend(batch.query, batch.kv_layer, batch, scale=1.0)


@pytest.mark.parametrize("form", ["bf16", "int8", "k8v4", "int4"])
def test_offsets_past_two_to_the_31st_are_right(paged, form, monkeypatch) -> None:
    # The interpreter would copy the pool onto itself, and touch every page of it.
    monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *_: None)
    small = paged([(1, 6), (40, 57)], block_size=16, num_kv_heads=1, num_heads=1, head_dim=64, form=form)
    expected = attend(small.query, small.kv_layer, small, scale=0.1)
    parts = planes_of(small.kv_layer)
    num_blocks = 2**31 // parts[1][0].numel() + 100  # pages that nobody touches cost nothing
    shift = num_blocks - len(parts[0])
    if isinstance(small.kv_layer, QuantizedLayer):
        keys, values = (torch.empty(num_blocks, *part.shape[1:], dtype=torch.uint8) for part in parts)
        layer = replace(small.kv_layer, planes=(keys, values))
    else:
        layer = torch.empty(2, num_blocks, *small.kv_layer.shape[2:], dtype=small.kv_layer.dtype)
    for large, part in zip(planes_of(layer), parts, strict=True):
        large[shift:] = part
    moved = replace(small, block_tables=small.block_tables + shift)
    assert torch.equal(attend(small.query, layer, moved, scale=0.1), expected)


@pytest.mark.parametrize("arch", [75, 80, 86, 89, 90, 100, 120])
def test_every_shape_has_a_launch_on_every_architecture(arch) -> None:
    for shape, head_dim, group in product(llama_8b(arch).values(), (64, 80, 96, 128, 256), (1, 3, 4, 8)):
        shape = replace(shape, head_dim=head_dim, group=group)
        for rows in (group, 16, paged_attention.MAX_SHORT_ROWS):
            assert paged_attention.short_launch(arch, shape, rows).tiles["rows"] >= rows
        assert paged_attention.chunk_launch(arch, shape).tiles["rows"] >= group


@pytest.mark.parametrize("op", [paged_attention, split_decode], ids=lambda op: op.__name__)
def test_variants_say_what_compiling_them_needs(op) -> None:
    variants = op.variants(90)
    assert len({variant.name for variant in variants}) == len(variants)
    for variant in variants:
        assert set(variant.signature) == set(variant.kernel.arg_names)
        assert set(variant.constants) == {name for name, kind in variant.signature.items() if kind == "constexpr"}
