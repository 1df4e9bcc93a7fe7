"""Causal attention of a mixed batch over the paged cache, decodes and prefill chunks in one launch.

    o = Σⱼ softmaxⱼ(cap(q · kⱼ · scale)) vⱼ   over the keys j ≤ p of the row's own sequence, j > p − sliding_window

with cap(s) = soft_cap · tanh(s / soft_cap). PagedAttention: Kwon et al. 2023; kernels over tiles: Dao 2023.

Bytes: every key and value of a sequence once for each of its tiles of queries, so a decode step has to move
2 · num_kv_heads · (bytes of a row) · Σ context_lens, and queries and outputs beside that count for nothing. Operations:
4 · num_heads · head_dim for each row and each key that it sees.

A program takes one tile of one sequence's queries, for one KV head. A tile of a *short* sequence has all its queries: a
decode's one, or a few with their guesses. What is longer is a *chunk* and takes higher tiles. How many programs there
are follows from the batch's Python ints alone, so that a launch can be captured in a graph; which sequence a chunk's
tile belongs to is looked up on the device. Few sequences with long contexts are split further: `split_decode.py`.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from pagedd.kernels.layout import KVLayer, PagedBatch, has_open_keys, planes_of
from pagedd.kernels.triton.attention_shape import AttentionShape, chunk_launch, llama_8b, other_models, short_launch
from pagedd.kernels.triton.attention_tile import (
    divisor,
    first_open_block,
    first_visible,
    load_queries,
    place_queries,
    see_keys,
    see_nothing,
    see_some_keys,
    store_rows,
)
from pagedd.kernels.triton.card import card_of
from pagedd.kernels.triton.launch import Launch
from pagedd.kernels.triton.split_decode import attend_split, choose_num_splits
from pagedd.kernels.triton.variant import Variant

# Query rows, all heads of a group counted, up to which a whole sequence is one tile and its context may be split.
MAX_SHORT_ROWS = 32


def paged_attention(
    query: torch.Tensor,
    kv_layer: KVLayer,
    batch: PagedBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    shape = AttentionShape.of(query, kv_layer, sliding_window, soft_cap)
    card = card_of(query.device)
    keys, values = planes_of(kv_layer)
    open_keys = kv_layer.open_keys if has_open_keys(kv_layer) else keys
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    num_seqs, max_rows = batch.context_lens.shape[0], batch.max_query_len * shape.group
    are_all_short = max_rows <= max(MAX_SHORT_ROWS, shape.group)
    num_short = num_seqs if are_all_short else batch.num_decodes
    short = short_launch(card.arch, shape, max_rows if are_all_short else shape.group)
    chunk = chunk_launch(card.arch, shape)
    num_splits = choose_num_splits(num_short * shape.num_kv_heads, batch.max_context_len, card)
    if num_splits > 1:
        attend_split(
            output,
            query,
            keys,
            values,
            open_keys,
            batch,
            shape=shape,
            launch=short,
            scale=scale,
            num_seqs=num_short,
            num_splits=num_splits,
        )
    num_unsplit, num_chunks = num_short if num_splits == 1 else 0, num_seqs - num_short
    # A sequence may leave room in its last tile, so each may need one more than the rows of all of them fill.
    queries_per_tile = chunk.tiles["rows"] // shape.group
    num_chunk_tiles = (query.shape[0] - num_short) // queries_per_tile + num_chunks if num_chunks else 0
    if num_chunk_tiles + num_unsplit:
        launch = chunk if num_chunks else short
        _attend[(num_chunk_tiles + num_unsplit, shape.num_kv_heads)](
            output,
            query,
            keys,
            values,
            open_keys,
            batch.query_starts,
            batch.context_lens,
            batch.block_tables,
            batch.open_tables,
            scale,
            query.stride(0),
            batch.block_tables.stride(0),
            batch.open_tables.stride(0),
            num_seqs,
            num_short,
            num_chunk_tiles,
            **_constants(shape, short if num_unsplit else None, chunk if num_chunks else None),
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
        )
    return output


def _constants(shape: AttentionShape, short: Launch | None, chunk: Launch | None) -> dict[str, Any]:
    """A batch without short sequences, or without chunks, has a kernel without the code for them."""
    return {
        "SHORT_ROWS": short.tiles["rows"] if short else 0,
        "SHORT_KEYS": short.tiles["keys"] if short else 0,
        "CHUNK_ROWS": chunk.tiles["rows"] if chunk else 0,
        "CHUNK_KEYS": chunk.tiles["keys"] if chunk else 0,
        "SHAPE": shape,
    }


# Numbers that differ from step to step must not make a kernel of their own each.
@triton.jit(
    do_not_specialize=["table_stride", "open_stride", "num_seqs", "num_short", "num_chunk_tiles"],
    do_not_specialize_on_alignment=["query_starts_ptr", "context_lens_ptr", "block_tables_ptr", "open_tables_ptr"],
)
def _attend(
    output_ptr,  # [num_tokens, num_heads, head_dim]
    query_ptr,  # [num_tokens, num_heads, head_dim]
    keys_ptr,  # [num_blocks, num_kv_heads, block_size, head_dim], or [num_blocks, num_kv_heads, record] bytes
    values_ptr,  # the same
    open_keys_ptr,  # [num_pages, num_kv_heads, block_size, head_dim]; not read unless the form has open keys
    query_starts_ptr,  # [num_seqs + 1] int32
    context_lens_ptr,  # [num_seqs] int32
    block_tables_ptr,  # [num_seqs, max_num_blocks] int32
    open_tables_ptr,  # [num_seqs, max_num_pages] int32
    scale,
    query_stride,
    table_stride,
    open_stride,
    num_seqs,
    num_short,
    num_chunk_tiles,
    SHORT_ROWS: tl.constexpr,  # 0: no short sequences
    SHORT_KEYS: tl.constexpr,
    CHUNK_ROWS: tl.constexpr,  # 0: no chunks
    CHUNK_KEYS: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Programs (tile, KV head): tiles of chunks first, which take longest, the last of a chunk before its first."""
    program = tl.program_id(0)
    if CHUNK_ROWS > 0:  # noqa: SIM102 – of a constant: what is not launched is not compiled
        if program < num_chunk_tiles:
            tile = num_chunk_tiles - 1 - program
            seq, first_query = _find_tile(query_starts_ptr, tile, num_seqs, num_short, CHUNK_ROWS // SHAPE.group)
            _attend_tile(
                output_ptr,
                query_ptr,
                keys_ptr,
                values_ptr,
                open_keys_ptr,
                query_starts_ptr,
                context_lens_ptr,
                block_tables_ptr,
                open_tables_ptr,
                scale,
                query_stride,
                table_stride,
                open_stride,
                seq,
                first_query,
                CHUNK_ROWS,
                CHUNK_KEYS,
                SHAPE.sliding_window is None,
                SHAPE,
            )
    if SHORT_ROWS > 0:  # noqa: SIM102
        if program >= num_chunk_tiles:
            _attend_tile(
                output_ptr,
                query_ptr,
                keys_ptr,
                values_ptr,
                open_keys_ptr,
                query_starts_ptr,
                context_lens_ptr,
                block_tables_ptr,
                open_tables_ptr,
                scale,
                query_stride,
                table_stride,
                open_stride,
                program - num_chunk_tiles,
                0,
                SHORT_ROWS,
                SHORT_KEYS,
                False,
                SHAPE,
            )


@triton.jit
def _find_tile(query_starts_ptr, tile, num_seqs, num_short, QUERIES: tl.constexpr):
    """Whose tile this is, and the first of its queries.

    Sequence i's tiles begin at (rows of chunks before it) // QUERIES + (chunks before it). The next sequence's begin no
    sooner than it has tiles, so one binary search finds it. Some tiles are left over: theirs are past the last query.
    """
    low, high = num_short, num_seqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        is_before = _first_tile(query_starts_ptr, middle, num_short, QUERIES) <= tile
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle - 1)
    return low, (tile - _first_tile(query_starts_ptr, low, num_short, QUERIES)) * QUERIES


@triton.jit
def _first_tile(query_starts_ptr, seq, num_short, QUERIES: tl.constexpr):
    # Where there are chunks, short sequences have one row each.
    return (tl.load(query_starts_ptr + seq) - num_short) // QUERIES + seq - num_short


@triton.jit
def _attend_tile(
    output_ptr,
    query_ptr,
    keys_ptr,
    values_ptr,
    open_keys_ptr,
    query_starts_ptr,
    context_lens_ptr,
    block_tables_ptr,
    open_tables_ptr,
    scale,
    query_stride,
    table_stride,
    open_stride,
    seq,
    first_query,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_COMMON_KEYS: tl.constexpr,  # whether whole tiles of keys, from the first, are seen by every row
    SHAPE: tl.constexpr,
):
    kv_head = tl.program_id(1)
    batch_rows, group_heads, positions, is_row, first_position, end_key = place_queries(
        query_starts_ptr, context_lens_ptr, seq, first_query, ROWS, SHAPE
    )
    heads = kv_head * SHAPE.group + group_heads
    query = load_queries(query_ptr, query_stride, batch_rows, heads, is_row, SHAPE)
    table_ptr = block_tables_ptr + seq.to(tl.int64) * table_stride
    open_table_ptr = open_tables_ptr + seq.to(tl.int64) * open_stride
    first_block = first_open_block(query_starts_ptr, context_lens_ptr, seq, SHAPE)
    first_key = first_visible(first_position, SHAPE)
    output, total, peak = see_nothing(ROWS, SHAPE)
    if HAS_COMMON_KEYS:
        first_own = first_position // SHAPE.block_size * SHAPE.block_size if SHAPE.has_open_keys else first_position + 1
        end_common = tl.minimum(first_own, end_key) // KEYS * KEYS
        output, total, peak = see_some_keys(
            output,
            total,
            peak,
            query,
            positions,
            positions,
            first_key,
            end_common,
            keys_ptr,
            values_ptr,
            table_ptr,
            open_keys_ptr,
            open_table_ptr,
            first_block,
            kv_head,
            scale,
            KEYS,
            False,
            False,
            SHAPE,
        )
        first_key = end_common
    output, total, peak = see_keys(
        output,
        total,
        peak,
        query,
        positions,
        first_position,
        first_key,
        end_key,
        keys_ptr,
        values_ptr,
        table_ptr,
        open_keys_ptr,
        open_table_ptr,
        first_block,
        kv_head,
        scale,
        KEYS,
        SHAPE,
    )
    store_rows(output_ptr, output / divisor(total)[:, None], batch_rows, heads, is_row, SHAPE)


def variants(arch: int) -> list[Variant]:
    """Decodes alone and chunks alone, over forms of the cache; for a Llama 8B, both in one launch as well."""
    found = []
    llama = llama_8b(arch)
    for form, shape in (llama | other_models(arch)).items():
        short, chunk = short_launch(arch, shape, shape.group), chunk_launch(arch, shape)
        kinds = {"decode": (short, None), "chunk": (None, chunk)} | ({"mixed": (short, chunk)} if form in llama else {})
        for name, launches in kinds.items():
            found.append(variant_of(f"paged_attention.{name}.{form}", shape, *launches, must_fit=True))
    return found


def variant_of(
    name: str, shape: AttentionShape, short: Launch | None, chunk: Launch | None, *, must_fit: bool = False
) -> Variant:
    """The kernel for sequences of which some are short, some are chunks, or all are one of these."""
    signature = {
        "query_starts_ptr": "*i32",
        "context_lens_ptr": "*i32",
        "block_tables_ptr": "*i32",
        "open_tables_ptr": "*i32",
        "scale": "fp32",
        "query_stride": "i32",
        "table_stride": "i32",
        "open_stride": "i32",
        "num_seqs": "i32",
        "num_short": "i32",
        "num_chunk_tiles": "i32",
    }
    constants, launch = _constants(shape, short, chunk), chunk or short
    assert launch is not None
    return Variant(
        name,
        _attend,
        {**shape.pointer_types, **signature, **dict.fromkeys(constants, "constexpr")},
        constants,
        aligned=frozenset({*shape.pointer_types, "query_stride"}),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        must_fit=must_fit,
        has_products=must_fit,
    )
