"""A step as tensors: what the model and the attention kernels read, and how it is made of a `Step`."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from pagedd.engine.kv.open_pages import OpenPages
from pagedd.engine.sequence import PENDING, Sequence
from pagedd.engine.staging import to_device
from pagedd.engine.step import ScheduledSequence


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMetadata:
    """Where each sequence's queries and keys lie. All tensors are int32 on the device unless said otherwise.

    Attributes:
        query_starts: [num_seqs + 1]; rows [query_starts[i], query_starts[i + 1]) of the batch belong to sequence i.
        context_lens: [num_seqs]; tokens of sequence i with KV after this step, its new ones included. Its queries are
            the last ones: row j of q_len sits at position context_len − q_len + j.
        block_tables: [num_seqs, max_num_blocks]; entries past a sequence's last block are 0 and never read.
        slot_mapping: [num_tokens] int64; block × block_size + offset where each new token's KV goes.
        max_query_len, max_context_len: the largest of each, as Python ints, so that no kernel has to ask the device.
        num_decodes: the first so many sequences have exactly one query row.
        open_slots, open_tables: as in `kernels.layout.PagedBatch`, the first int64; empty without open keys.
    """

    query_starts: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    max_query_len: int
    max_context_len: int
    num_decodes: int
    open_slots: torch.Tensor
    open_tables: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Flattened tokens of all scheduled sequences, no padding.

    Attributes:
        token_ids: [num_tokens] int64.
        positions: [num_tokens] int64.
        logits_rows: [num_rows] int64; rows whose logits are wanted.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    logits_rows: torch.Tensor
    attention: AttentionMetadata


def build_batch(
    scheduled: list[ScheduledSequence],
    block_size: int,
    device: torch.device,
    drawn_rows: Mapping[Sequence, int] | None = None,
    open_pages: OpenPages | None = None,
) -> Batch:
    """The step's tokens, flattened: sequences with one token first. `logits_rows` is in the order of `scheduled`.

    In place of a `PENDING` token is −1 − row, the row that `drawn_rows` has for the sequence; `KeyError` for one that
    it does not have.

    Args:
        open_pages: where the cache has open keys: every block that the step writes to is opened.
    """
    ordered = sorted(scheduled, key=lambda item: item.num_scheduled_tokens != 1)  # stable
    starts = np.array([item.start for item in ordered], dtype=np.int64)
    query_lens = np.array([item.num_scheduled_tokens for item in ordered], dtype=np.int64)
    context_lens = starts + query_lens
    query_starts = np.zeros(len(ordered) + 1, dtype=np.int64)
    np.cumsum(query_lens, out=query_starts[1:])

    num_blocks = -(-context_lens // block_size)
    block_tables = np.zeros((len(ordered), int(num_blocks.max())), dtype=np.int32)
    for row, (item, count) in enumerate(zip(ordered, num_blocks.tolist(), strict=True)):
        block_tables[row, :count] = item.sequence.block_table[:count]

    owners = np.repeat(np.arange(len(ordered)), query_lens)  # which sequence each token belongs to
    positions = np.arange(query_starts[-1]) + np.repeat(starts - query_starts[:-1], query_lens)
    slots = block_tables[owners, positions // block_size].astype(np.int64) * block_size + positions % block_size
    open_tables = np.zeros((len(ordered), 0), dtype=np.int32)
    open_slots = np.zeros(0, dtype=np.int64)
    if open_pages is not None:
        first_blocks = starts // block_size
        open_tables = np.zeros((len(ordered), int((num_blocks - first_blocks).max())), dtype=np.int32)
        for row, item in enumerate(ordered):
            written = item.sequence.block_table[first_blocks[row] : num_blocks[row]]
            open_tables[row, : len(written)] = [open_pages.open(block_id) for block_id in written]
        pages = open_tables[owners, positions // block_size - first_blocks[owners]]
        open_slots = pages.astype(np.int64) * block_size + positions % block_size
    tokens = np.fromiter(
        itertools.chain.from_iterable(item.token_ids for item in ordered), dtype=np.int64, count=int(query_starts[-1])
    )
    for row in np.flatnonzero(tokens == PENDING).tolist():
        tokens[row] = -1 - (drawn_rows or {})[ordered[owners[row]].sequence]
    end_rows = {id(item): row for item, row in zip(ordered, query_starts[1:].tolist(), strict=True)}
    logits_rows = [
        row
        for item in scheduled
        if item.samplers
        for row in range(end_rows[id(item)] - 1 - len(item.draft_token_ids), end_rows[id(item)])
    ]

    staged = to_device(
        [
            tokens,
            positions,
            np.array(logits_rows, dtype=np.int64),
            slots,
            query_starts.astype(np.int32),
            context_lens.astype(np.int32),
            block_tables,
            open_slots,
            open_tables,
        ],
        device,
    )
    return Batch(
        token_ids=staged[0],
        positions=staged[1],
        logits_rows=staged[2],
        attention=AttentionMetadata(
            slot_mapping=staged[3],
            query_starts=staged[4],
            context_lens=staged[5],
            block_tables=staged[6],
            max_query_len=int(query_lens.max()),
            max_context_len=int(context_lens.max()),
            num_decodes=int(np.count_nonzero(query_lens == 1)),
            open_slots=staged[7],
            open_tables=staged[8],
        ),
    )
