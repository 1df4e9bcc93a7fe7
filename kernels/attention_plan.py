"""How the torch backend takes a batch's attention apart: which rows go together, over which blocks, under which mask.

Follows from the step alone, so it is worked out once and used by all layers. Knows no key and no query: what is
computed of a part is the business of `torch_ops.py`.
"""

import functools
import itertools
from dataclasses import dataclass

import torch

from pagedd.kernels.layout import MAX_GATHERED_SLOTS, PagedBatch

# Decodes of unequal length share a product by padding to the longest. A further product costs about as much as
# this many padded slots (2 cores, AVX-512), so a group is closed when it would waste more.
MAX_PADDED_SLOTS = 2048

TILE_ROWS = 128  # query rows of a prefill chunk that meet their keys in one product


@dataclass(frozen=True, slots=True)
class Decodes:
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
class Tile:
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
class Chunk:
    """One sequence's new rows. `block_rows` as in `Decodes`, for one sequence; `open_pages` of all blocks it is in."""

    block_rows: torch.Tensor
    num_slots: int
    tiles: tuple[Tile, ...]
    open_pages: torch.Tensor


@functools.lru_cache(maxsize=4)  # one entry per sliding window in use; the batch is hashed by identity
def plan(
    batch: PagedBatch, num_kv_heads: int, block_size: int, sliding_window: int | None
) -> tuple[Decodes | Chunk, ...]:
    """The parts of a batch that are computed one after another, which together write every row."""
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
) -> Decodes:
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
    return Decodes(
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
) -> Chunk:
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
            Tile(
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
    return Chunk(block_rows, num_slots, tuple(tiles), open_pages[: end_block - start // block_size])


def _block_rows(blocks: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Rows of a layer seen as [num_blocks × num_kv_heads, …]; [num_seqs, num_blocks] → flat (sequence, head, block).

    int64, because offsets into a large pool pass 2³¹.
    """
    heads = torch.arange(num_kv_heads, device=blocks.device)[:, None]
    return (blocks.long()[:, None] * num_kv_heads + heads).flatten()
