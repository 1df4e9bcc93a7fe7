"""The shapes that every backend agrees on: the paged KV cache, and a batch's place in it.

The KV cache of one layer is `kv_layer[2, num_blocks, num_kv_heads, block_size, head_dim]`, keys first, then values. A
*slot* is `block * block_size + offset`; the block table of a sequence maps its logical blocks to physical ones.
Knows nothing of sequences or of who fills the tables: see `engine/batch.py` and `engine/runner.py`.
"""

from collections.abc import Hashable
from typing import Protocol

import torch

# No backend copies the KV of more slots at a time, unless a single sequence has more: the peak of memory that attention
# needs beside the cache is known, and a batch of long contexts does not need a second copy of its KV.
MAX_GATHERED_SLOTS = 32_768


class PagedBatch(Hashable, Protocol):
    """Where each sequence's queries and keys lie. int32 tensors on the device unless said otherwise; never changed.

    Hashable by identity, so that a backend may derive its own tables once and use them in every layer.

    Attributes:
        query_starts: [num_seqs + 1]; rows [query_starts[i], query_starts[i + 1]) belong to sequence i.
        context_lens: [num_seqs]; keys of sequence i, its new ones included. Its queries are the last positions.
        block_tables: [num_seqs, max_num_blocks]; entries past the last block are never read as data.
        slot_mapping: [num_tokens] int64; the slot of each row's own key and value.
        max_query_len, max_context_len: the largest of each, so that no kernel has to ask the device.
        num_decodes: the first so many sequences have exactly one query row.
    """

    @property
    def query_starts(self) -> torch.Tensor: ...
    @property
    def context_lens(self) -> torch.Tensor: ...
    @property
    def block_tables(self) -> torch.Tensor: ...
    @property
    def slot_mapping(self) -> torch.Tensor: ...
    @property
    def max_query_len(self) -> int: ...
    @property
    def max_context_len(self) -> int: ...
    @property
    def num_decodes(self) -> int: ...
