"""The vectorised torch backend: serves on a CPU, and on any device that has no backend of its own.

Attention gathers a sequence's blocks into contiguous keys and values. The query heads that share a KV head are the rows
of one matrix, so that keys are never repeated. Decodes go together in a few batched products; prefill chunks go one
sequence at a time, in tiles of rows, so that the scores stay in cache and a causal tile skips the keys after it (two
to three times as quick in bfloat16 as `scaled_dot_product_attention` on AVX-512). What depends on the step alone (which
blocks, which mask) is worked out once, in `_plan`, and used by all layers. Signatures are those of `ops.py`.

Scores are rounded to the dtype of a float cache, or of the query where the cache is quantized, and the softmax is taken
in float32. Of a quantized cache only the gathered blocks are dequantized.
"""

import functools
import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from pagedd.kernels.layout import (
    MAX_GATHERED_SLOTS,
    KVLayer,
    PagedBatch,
    QuantizedLayer,
    block_size_of,
    has_open_keys,
)
from pagedd.kernels.packed_weight import PackedWeight
from pagedd.kernels.ranking import keep_best

__all__ = [
    "add_rms_norm",
    "apply_rope",
    "close_blocks",
    "keep_best",
    "packed_linear",
    "paged_attention",
    "rms_norm",
    "rope_and_write_kv",
    "silu_and_mul",
    "write_kv",
]

# Decodes of unequal length share a product by padding to the longest. A further product costs about as much as
# this many padded slots (2 cores, AVX-512), so a group is closed when it would waste more.
MAX_PADDED_SLOTS = 2048

TILE_ROWS = 128  # query rows of a prefill chunk that meet their keys in one product


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return F.rms_norm(total, (x.shape[-1],), weight, eps), total


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    rotated = first * sin
    first.mul_(cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).add_(rotated)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_layer: KVLayer,
    slot_mapping: torch.Tensor,
    open_slots: torch.Tensor | None = None,
) -> None:
    block_size = block_size_of(kv_layer)
    blocks = torch.div(slot_mapping, block_size, rounding_mode="floor")
    offsets = slot_mapping - blocks * block_size
    for plane, x in enumerate((key, value)):
        if open_slots is not None and plane == 0 and has_open_keys(kv_layer):
            pages = torch.div(open_slots, block_size, rounding_mode="floor")
            kv_layer.open_keys[pages, :, open_slots - pages * block_size] = x.bfloat16()
        elif isinstance(kv_layer, QuantizedLayer):
            kv_layer.write(plane, blocks, offsets, x)
        else:
            kv_layer[plane][blocks, :, offsets] = x.to(kv_layer.dtype)


def rope_and_write_kv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_layer: KVLayer,
    slot_mapping: torch.Tensor,
    open_slots: torch.Tensor | None = None,
) -> None:
    apply_rope(query, cos, sin)
    apply_rope(key, cos, sin)
    write_kv(key, value, kv_layer, slot_mapping, open_slots)


def close_blocks(kv_layer: QuantizedLayer, batch: PagedBatch) -> None:
    blocks, pages = _full_blocks(batch, kv_layer.block_size)
    kv_layer.close(blocks, pages)


@functools.lru_cache(maxsize=1)  # the batch is hashed by identity
def _full_blocks(batch: PagedBatch, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks that a step fills, and their pages."""
    ends = batch.context_lens.long() // block_size
    firsts = (batch.context_lens - batch.query_starts.diff()).long() // block_size
    columns = torch.arange(batch.open_tables.shape[1], device=ends.device)
    is_full = columns < (ends - firsts)[:, None]
    logical = (firsts[:, None] + columns).clamp(max=batch.block_tables.shape[1] - 1)
    return batch.block_tables.gather(1, logical)[is_full].long(), batch.open_tables[is_full].long()


def packed_linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, weight.dequantize().to(x.dtype), None if bias is None else bias.to(x.dtype))


def paged_attention(
    query: torch.Tensor,
    kv_layer: KVLayer,
    batch: PagedBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    head_dim, block_size = query.shape[-1], block_size_of(kv_layer)
    output = torch.empty_like(query)
    if isinstance(kv_layer, QuantizedLayer):
        num_kv_heads = kv_layer.planes[0].shape[1]
    else:
        num_kv_heads, query = kv_layer.shape[2], query.to(kv_layer.dtype)
    for part in _plan(batch, num_kv_heads, block_size, sliding_window):
        k, v = (
            _gather(kv_layer, plane, part.block_rows, query.dtype).view(-1, part.num_slots, head_dim)
            for plane in range(2)
        )
        open_keys = _gather_open(kv_layer, part.open_pages, query.dtype)
        if isinstance(part, _Decodes):
            if open_keys is not None:  # of the last block: the one that each of them is in
                blocks = k.view(len(part.rows), num_kv_heads, -1, block_size, head_dim)
                blocks[torch.arange(len(part.rows)), :, part.own_columns] = open_keys
            v.view(-1, head_dim).index_fill_(0, part.stale_rows, 0)
            attended = _attend_decodes(query[part.rows], k, v, part.is_hidden, scale, soft_cap)
            output[part.rows] = attended.to(output.dtype)
        else:
            for tile in part.tiles:
                tile_keys = slice(tile.first_key, tile.end_key)
                own_keys = None if open_keys is None else open_keys.transpose(0, 1).flatten(1, 2)[:, tile.own_keys]
                output[tile.first_row : tile.end_row] = _attend_tile(
                    query[tile.first_row : tile.end_row],
                    k[:, tile_keys],
                    v[:, tile_keys],
                    own_keys,
                    tile.is_own,
                    tile.is_hidden,
                    scale,
                    soft_cap,
                )
    return output


def _gather_open(kv_layer: KVLayer, pages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """[num_pages, num_kv_heads, block_size, head_dim] where the form has open keys."""
    if has_open_keys(kv_layer):
        return kv_layer.open_keys.index_select(0, pages).to(dtype)
    return None


def _gather(kv_layer: KVLayer, plane: int, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Blocks of keys (`plane` 0) or values (1) in the float dtype; `rows` as in `_Decodes`."""
    if isinstance(kv_layer, QuantizedLayer):
        return kv_layer.dequantize_rows(plane, rows).to(dtype)
    return kv_layer[plane].flatten(0, 1).index_select(0, rows)


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Sequences with one query row each, padded to the same number of slots.

    Attributes:
        rows: [num_seqs]; their rows of the batch.
        block_rows: [num_seqs × num_kv_heads × num_blocks]; rows of the layer's keys seen as (block, head).
        is_hidden: [num_seqs, 1, 1, num_slots] bool.
        stale_rows: rows of the gathered values, seen as [num_seqs × num_kv_heads × num_slots, head_dim], that the
            sequence never wrote. Their weight is 0, but what an earlier owner of the block left there may be NaN, and
            0 × NaN would reach this sequence: they are cleared after gathering.
        open_pages: [num_seqs]; of each one's own block, where the form of the cache has open keys.
        own_columns: [num_seqs]; which of its gathered blocks that is.
    """

    rows: torch.Tensor
    block_rows: torch.Tensor
    num_slots: int
    is_hidden: torch.Tensor
    stale_rows: torch.Tensor
    open_pages: torch.Tensor
    own_columns: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Tile:
    """Rows [first_row, end_row) of the batch against the gathered keys [first_key, end_key).

    Attributes:
        is_hidden: [num_rows, n] bool, of the last n of those keys; every row sees the ones before them.
        own_keys: the last of the tile's keys, from the first row's block on, among those of the chunk's open pages.
        is_own: [num_rows, keys of `own_keys`] bool; whether row and key are of one block.
    """

    first_row: int
    end_row: int
    first_key: int
    end_key: int
    is_hidden: torch.Tensor
    own_keys: slice
    is_own: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One sequence's new rows. `block_rows` as in `_Decodes`, for one sequence; `open_pages` of all blocks it is in."""

    block_rows: torch.Tensor
    num_slots: int
    tiles: tuple[_Tile, ...]
    open_pages: torch.Tensor


@functools.lru_cache(maxsize=4)  # one entry per sliding window in use; the batch is hashed by identity
def _plan(
    batch: PagedBatch, num_kv_heads: int, block_size: int, sliding_window: int | None
) -> tuple[_Decodes | _Chunk, ...]:
    contexts = batch.context_lens.tolist()
    decodes = [
        _plan_decodes(batch, members, contexts, num_kv_heads, block_size, sliding_window)
        for members in _group_by_length(contexts[: batch.num_decodes], block_size)
    ]
    chunk_starts = itertools.pairwise(batch.query_starts.tolist()[batch.num_decodes :])
    chunks = [
        _plan_chunk(table, pages, first_row, end_row, context_len, num_kv_heads, block_size, sliding_window)
        for table, pages, (first_row, end_row), context_len in zip(
            batch.block_tables[batch.num_decodes :],
            batch.open_tables[batch.num_decodes :],
            chunk_starts,
            contexts[batch.num_decodes :],
            strict=True,
        )
    ]
    return (*decodes, *chunks)


def _group_by_length(contexts: list[int], block_size: int) -> list[list[int]]:
    """Cuts the sequences, longest first, into groups that waste and gather no more than the limits."""
    groups: list[list[int]] = []
    padded = longest = 0
    for i in sorted(range(len(contexts)), key=contexts.__getitem__, reverse=True):
        padded += longest - contexts[i]
        if not groups or padded > MAX_PADDED_SLOTS or (len(groups[-1]) + 1) * longest > MAX_GATHERED_SLOTS:
            groups.append([])
            longest = -(-contexts[i] // block_size) * block_size
            padded = longest - contexts[i]
        groups[-1].append(i)
    return groups


def _plan_decodes(
    batch: PagedBatch,
    members: list[int],
    contexts: list[int],
    num_kv_heads: int,
    block_size: int,
    sliding_window: int | None,
) -> _Decodes:
    device = batch.block_tables.device
    rows = torch.tensor(members, device=device)
    lens = torch.tensor([contexts[i] for i in members], device=device)[:, None]
    oldest = torch.zeros_like(lens) if sliding_window is None else (lens - sliding_window).clamp(min=0)  # visible key
    first_blocks, end_blocks = oldest // block_size, (lens + block_size - 1) // block_size
    num_blocks = int((end_blocks - first_blocks).max())
    columns = first_blocks + torch.arange(num_blocks, device=device)
    # Padding repeats the sequence's last full block: its own data, so that nothing has to be cleared there.
    full_blocks = (lens // block_size - 1).clamp(min=0)
    columns = torch.where(columns < end_blocks, columns, full_blocks)
    blocks = batch.block_tables[rows].gather(1, columns)
    offsets = torch.arange(num_blocks * block_size, device=device)
    positions = first_blocks * block_size + offsets
    is_hidden = (positions >= lens) | (positions < oldest)
    is_stale = columns.repeat_interleave(block_size, dim=1) * block_size + offsets % block_size >= lens
    stale_rows = is_stale[:, None].expand(-1, num_kv_heads, -1).flatten().nonzero().flatten()
    return _Decodes(
        rows,
        _block_rows(blocks, num_kv_heads),
        num_blocks * block_size,
        is_hidden[:, None, None],
        stale_rows,
        open_pages=batch.open_tables[rows, :1].flatten(),
        own_columns=(end_blocks - 1 - first_blocks).flatten(),
    )


def _plan_chunk(
    block_table: torch.Tensor,  # [max_num_blocks]
    open_pages: torch.Tensor,  # [max_num_pages]
    first_row: int,
    end_row: int,
    context_len: int,
    num_kv_heads: int,
    block_size: int,
    sliding_window: int | None,
) -> _Chunk:
    start = context_len - (end_row - first_row)  # position of the first row
    window = context_len if sliding_window is None else sliding_window
    first_block, end_block = max(0, start - window + 1) // block_size, -(-context_len // block_size)
    first_slot = first_block * block_size  # position of the first gathered key
    tiles = []
    for tile_row in range(first_row, end_row, TILE_ROWS):
        tile_end = min(tile_row + TILE_ROWS, end_row)
        first_query, end_key = start + tile_row - first_row, start + tile_end - first_row
        first_key = max(0, first_query - window + 1)
        first_masked = (
            first_query if end_key <= window else first_key
        )  # without a window, only the last corner is hidden
        queries = torch.arange(first_query, end_key, device=block_table.device)[:, None]
        keys = torch.arange(first_masked, end_key, device=block_table.device)
        is_hidden = (keys > queries) | (keys <= queries - window)
        first_own = max(first_key, first_query // block_size * block_size)
        own = torch.arange(first_own, end_key, device=block_table.device)
        first_page_slot = start // block_size * block_size
        tiles.append(
            _Tile(
                tile_row,
                tile_end,
                first_key - first_slot,
                end_key - first_slot,
                is_hidden,
                own_keys=slice(first_own - first_page_slot, end_key - first_page_slot),
                is_own=own // block_size == queries // block_size,
            )
        )
    num_slots = (end_block - first_block) * block_size
    block_rows = _block_rows(block_table[None, first_block:end_block], num_kv_heads)
    return _Chunk(block_rows, num_slots, tuple(tiles), open_pages[: end_block - start // block_size])


def _block_rows(blocks: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Rows of a layer seen as [num_blocks × num_kv_heads, …]; [num_seqs, num_blocks] → flat (sequence, head, block).

    int64, because offsets into a large pool pass 2³¹.
    """
    heads = torch.arange(num_kv_heads, device=blocks.device)[:, None]
    return (blocks.long()[:, None] * num_kv_heads + heads).flatten()


def _attend_decodes(
    query: torch.Tensor,  # [num_seqs, num_heads, head_dim]
    key: torch.Tensor,  # [num_seqs × num_kv_heads, num_slots, head_dim]
    value: torch.Tensor,  # the same
    is_hidden: torch.Tensor,  # [num_seqs, 1, 1, num_slots]
    scale: float,
    soft_cap: float | None,
) -> torch.Tensor:
    num_seqs, num_heads, head_dim = query.shape
    num_pairs, num_slots, _ = key.shape
    folded = query.reshape(num_pairs, -1, head_dim)
    scores = _scores(folded, key, scale, soft_cap)
    scores.view(num_seqs, num_pairs // num_seqs, -1, num_slots).masked_fill_(is_hidden, float("-inf"))
    return torch.bmm(scores.softmax(dim=-1), value).view(num_seqs, num_heads, head_dim)


def _attend_tile(
    query: torch.Tensor,  # [num_rows, num_heads, head_dim]
    key: torch.Tensor,  # [num_kv_heads, num_keys, head_dim]
    value: torch.Tensor,  # the same
    own_keys: torch.Tensor | None,  # [num_kv_heads, n, head_dim], open keys in place of the last n
    is_own: torch.Tensor,  # [num_rows, n], for which rows
    is_hidden: torch.Tensor,  # [num_rows, n]
    scale: float,
    soft_cap: float | None,
) -> torch.Tensor:
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads, num_keys, _ = key.shape
    folded = query.view(num_rows, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3).reshape(num_kv_heads, -1, head_dim)
    scores = _scores(folded, key, scale, soft_cap)
    if own_keys is not None:
        own = _scores(folded, own_keys, scale, soft_cap).view(num_heads, num_rows, -1)
        quantized = scores.view(num_heads, num_rows, num_keys)[..., num_keys - own.shape[-1] :]
        quantized.copy_(torch.where(is_own, own, quantized))
    masked = scores.view(num_heads, num_rows, num_keys)[..., num_keys - is_hidden.shape[1] :]
    masked.masked_fill_(is_hidden, float("-inf"))
    attended = torch.bmm(scores.softmax(dim=-1), value)
    return attended.view(num_heads, num_rows, head_dim).transpose(0, 1)


def _scores(query: torch.Tensor, key: torch.Tensor, scale: float, soft_cap: float | None) -> torch.Tensor:
    """[batch, rows, head_dim] × [batch, keys, head_dim] → [batch, rows, keys]."""
    scores = torch.bmm(query * scale, key.transpose(1, 2))
    if soft_cap is not None:
        scores.div_(soft_cap).tanh_().mul_(soft_cap)
    return scores
