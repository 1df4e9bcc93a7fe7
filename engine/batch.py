"""A step as tensors: what the model and the attention kernels read. Built by `runner.py` from a `Step`."""

from dataclasses import dataclass

import torch


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
    """

    query_starts: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    max_query_len: int
    max_context_len: int
    num_decodes: int


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
