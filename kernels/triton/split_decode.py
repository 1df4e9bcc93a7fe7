"""Attention of few short sequences with long contexts: each context is cut over several programs.

With one program for a sequence and KV head, a lone request would leave most of a card idle. Split s of a sequence
computes oₛ and the logarithm of its softmax's denominator, Lₛ = log₂ Σⱼ 2^sⱼ, over its own keys, and then

    o = Σₛ 2^(Lₛ − L) oₛ,   L = log₂ Σₛ 2^Lₛ

(flash-decoding: Dao et al. 2023). Bytes: the same keys and values as in one pass, and 8 · head_dim beside for each row,
head and split, written and read once. How many splits there are follows from Python ints, how long they are from the
context on the device: a captured launch serves every length, and what is too short for all its splits uses fewer.
"""

import torch
import triton
import triton.language as tl

from pagedd.kernels.layout import PagedBatch
from pagedd.kernels.triton.attention_shape import AttentionShape, llama_8b, other_models, short_launch
from pagedd.kernels.triton.attention_tile import (
    divisor,
    first_open_block,
    first_visible,
    load_queries,
    place_queries,
    see_keys,
    see_nothing,
    store_rows,
)
from pagedd.kernels.triton.card import Card
from pagedd.kernels.triton.launch import Launch
from pagedd.kernels.triton.variant import Variant

# Several programs for each processor even out contexts of different lengths, and one hides the start of another.
PROGRAMS_PER_PROCESSOR = 4

# A shorter split would spend more time on starting and merging than on its keys.
MIN_KEYS = tl.constexpr(128)

MAX_SPLITS = tl.constexpr(64)  # merging a row then reads no more than a pass over 128 keys in 16 bits does


def choose_num_splits(num_programs: int, max_context_len: int, card: Card) -> int:
    """Into how many each of `num_programs` (sequence, KV head) is cut: 1 where the card is full without.

    Of Python ints alone, so that a captured launch keeps its grid.
    """
    if num_programs == 0:
        return 1
    wanted = PROGRAMS_PER_PROCESSOR * card.num_processors // num_programs
    return int(max(1, min(wanted, max_context_len // MIN_KEYS.value, MAX_SPLITS.value)))


def attend_split(
    output: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    open_keys: torch.Tensor,
    batch: PagedBatch,
    *,
    shape: AttentionShape,
    launch: Launch,
    scale: float,
    num_seqs: int,
    num_splits: int,
) -> None:
    """Writes the rows of the first `num_seqs` sequences, whose queries are one tile each.

    Args:
        output: [num_tokens, num_heads, head_dim], contiguous.
        query: the same shape; may be a view into wider rows.
        keys, values: planes of the layer; open_keys: its pages, or anything where the form has none.
        launch: of such tiles.
    """
    are_all = num_seqs == batch.context_lens.shape[0]
    max_query_len = batch.max_query_len if are_all else 1  # beside chunks, short sequences have one row
    num_rows = query.shape[0] if are_all else num_seqs
    partial = torch.empty(num_splits, num_rows, shape.num_heads, shape.head_dim, device=query.device)
    levels = torch.empty(num_splits, num_rows, shape.num_heads, device=query.device)
    _attend_splits[(num_splits, shape.num_kv_heads, num_seqs)](
        partial,
        levels,
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
        num_rows,
        ROWS=launch.tiles["rows"],
        KEYS=launch.tiles["keys"],
        SHAPE=shape,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    _merge_splits[(num_seqs, shape.num_heads, max_query_len)](
        output,
        partial,
        levels,
        batch.query_starts,
        batch.context_lens,
        num_splits,
        num_rows,
        KEYS=launch.tiles["keys"],
        SHAPE=shape,
        num_warps=_MERGE_WARPS,
    )


_MERGE_WARPS = 4
_MERGED_AT_ONCE = tl.constexpr(16)  # splits whose rows are read together


# Numbers that differ from step to step must not make a kernel of their own each.
@triton.jit(
    do_not_specialize=["table_stride", "open_stride", "num_rows"],
    do_not_specialize_on_alignment=["query_starts_ptr", "context_lens_ptr", "block_tables_ptr", "open_tables_ptr"],
)
def _attend_splits(
    partial_ptr,  # [num_splits, num_rows, num_heads, head_dim] float32
    levels_ptr,  # [num_splits, num_rows, num_heads] float32
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
    num_rows,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Programs (split, KV head, sequence). A split without keys leaves its part of the workspace as it is."""
    split, kv_head, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch_rows, group_heads, positions, is_row, first_position, end_key = place_queries(
        query_starts_ptr, context_lens_ptr, seq, 0, ROWS, SHAPE
    )
    first_key = first_visible(first_position, SHAPE)
    length = _split_length(end_key - first_key, tl.num_programs(0), KEYS)
    first_key += split * length
    end_key = tl.minimum(first_key + length, end_key)
    if first_key < end_key:
        heads = kv_head * SHAPE.group + group_heads
        query = load_queries(query_ptr, query_stride, batch_rows, heads, is_row, SHAPE)
        table_ptr = block_tables_ptr + seq.to(tl.int64) * table_stride
        output, total, peak = see_nothing(ROWS, SHAPE)
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
            open_tables_ptr + seq.to(tl.int64) * open_stride,
            first_open_block(query_starts_ptr, context_lens_ptr, seq, SHAPE),
            kv_head,
            scale,
            KEYS,
            SHAPE,
        )
        total = divisor(total)
        workspace_rows = split.to(tl.int64) * num_rows + batch_rows
        store_rows(partial_ptr, output / total[:, None], workspace_rows, heads, is_row, SHAPE)
        tl.store(levels_ptr + workspace_rows * SHAPE.num_heads + heads, peak + tl.log2(total), mask=is_row)


@triton.jit(
    do_not_specialize=["num_splits", "num_rows"],
    do_not_specialize_on_alignment=["query_starts_ptr", "context_lens_ptr"],
)
def _merge_splits(
    output_ptr,  # [num_tokens, num_heads, head_dim]
    partial_ptr,  # [num_splits, num_rows, num_heads, head_dim] float32
    levels_ptr,  # [num_splits, num_rows, num_heads] float32
    query_starts_ptr,  # [num_seqs + 1] int32
    context_lens_ptr,  # [num_seqs] int32
    num_splits,
    num_rows,
    KEYS: tl.constexpr,  # as the splits were cut
    SHAPE: tl.constexpr,
):
    """Programs (sequence, head, query of the sequence)."""
    seq, head, query = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    query_start = tl.load(query_starts_ptr + seq)
    query_len = tl.load(query_starts_ptr + seq + 1) - query_start
    if query < query_len:
        end_key = tl.load(context_lens_ptr + seq)
        num_keys = end_key - first_visible(end_key - query_len, SHAPE)
        num_filled = tl.cdiv(num_keys, _split_length(num_keys, num_splits, KEYS))
        row = (query_start + query).to(tl.int64) * SHAPE.num_heads + head
        split_stride = num_rows.to(tl.int64) * SHAPE.num_heads
        splits = tl.arange(0, MAX_SPLITS)
        levels = tl.load(levels_ptr + splits * split_stride + row, mask=splits < num_filled, other=float("-inf"))
        peak = tl.max(levels)
        peak = tl.where(peak == float("-inf"), 0.0, peak)
        total = tl.sum(tl.exp2(levels - peak))
        dims = tl.arange(0, SHAPE.dims)
        output = tl.zeros([SHAPE.dims], tl.float32)
        for first in range(0, num_filled, _MERGED_AT_ONCE):
            some = first + tl.arange(0, _MERGED_AT_ONCE)
            is_filled = some < num_filled
            rows = some * split_stride + row
            weights = tl.exp2(tl.load(levels_ptr + rows, mask=is_filled, other=float("-inf")) - peak)
            part = tl.load(
                partial_ptr + rows[:, None] * SHAPE.head_dim + dims[None, :],
                mask=is_filled[:, None] & (dims < SHAPE.head_dim)[None, :],
                other=0,
            )
            output += tl.sum(weights[:, None] * part, axis=0)
        tl.store(output_ptr + row * SHAPE.head_dim + dims, output / divisor(total), mask=dims < SHAPE.head_dim)


@triton.jit
def _split_length(num_keys, num_splits, KEYS: tl.constexpr):
    """Keys of one split: whole tiles, and not too few."""
    return tl.maximum(tl.cdiv(tl.cdiv(num_keys, num_splits), KEYS) * KEYS, MIN_KEYS)


def variants(arch: int) -> list[Variant]:
    """What a Llama 8B and others are served with, over forms of the cache."""
    found = []
    for form, shape in (llama_8b(arch) | other_models(arch)).items():
        types, launch = shape.pointer_types, short_launch(arch, shape, shape.group)
        workspace = {"partial_ptr": "*fp32", "levels_ptr": "*fp32"}
        place = {"query_starts_ptr": "*i32", "context_lens_ptr": "*i32"}
        tile = {"ROWS": launch.tiles["rows"], "KEYS": launch.tiles["keys"], "SHAPE": shape}
        reads = {name: types[name] for name in ("query_ptr", "keys_ptr", "values_ptr", "open_keys_ptr")}
        numbers = dict.fromkeys(("query_stride", "table_stride", "open_stride", "num_rows"), "i32")
        found.append(
            Variant(
                f"split_decode.attend.{form}",
                _attend_splits,
                {
                    **workspace,
                    **reads,
                    **place,
                    "block_tables_ptr": "*i32",
                    "open_tables_ptr": "*i32",
                    "scale": "fp32",
                    **numbers,
                    **dict.fromkeys(tile, "constexpr"),
                },
                tile,
                aligned=frozenset({*workspace, *reads, "query_stride"}),
                num_warps=launch.num_warps,
                num_stages=launch.num_stages,
                must_fit=True,
                has_products=True,
            )
        )
        merge = {"KEYS": launch.tiles["keys"], "SHAPE": shape}
        found.append(
            Variant(
                f"split_decode.merge.{form}",
                _merge_splits,
                {
                    "output_ptr": types["output_ptr"],
                    **workspace,
                    **place,
                    "num_splits": "i32",
                    "num_rows": "i32",
                    **dict.fromkeys(merge, "constexpr"),
                },
                merge,
                aligned=frozenset({"output_ptr", *workspace}),
                num_warps=_MERGE_WARPS,
                must_fit=True,
            )
        )
    return found
