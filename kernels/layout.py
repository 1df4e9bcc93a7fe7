"""The shapes that every backend agrees on: the paged KV cache, and a batch's place in it.

The KV cache of one layer is `kv_layer[2, num_blocks, num_kv_heads, block_size, head_dim]`, keys first, then values, or
a `QuantizedLayer`. A *slot* is `block * block_size + offset`; the block table of a sequence maps its logical blocks to
physical ones. Knows nothing of sequences or of who fills the tables: see `engine/batch.py`.
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from pagedd.kernels.kv_form import KVForm

# No backend copies the KV of more slots at a time, unless a single sequence has more: the peak of memory that attention
# needs beside the cache is known, and a batch of long contexts does not need a second copy of its KV.
MAX_GATHERED_SLOTS = 32_768


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedLayer:
    """One layer's cache in a quantized form.

    Attributes:
        data: [2, num_blocks, num_kv_heads, record_bytes] uint8, keys first; records as in `kv_form.py`.
            Of what is gathered from it, [num_rows, record_bytes].
    """

    data: torch.Tensor
    form: KVForm
    block_size: int
    head_dim: int

    @property
    def values(self) -> torch.Tensor:
        """[2, num_blocks, num_kv_heads, block_size, value_bytes], a view."""
        return self._part(0, self.form.value_bytes(self.head_dim))

    @property
    def scales(self) -> torch.Tensor:
        """[2, num_blocks, num_kv_heads, block_size, scale_bytes], a view."""
        start = self.block_size * self.form.value_bytes(self.head_dim)
        return self._part(start, self.form.scale_bytes(self.head_dim))

    def dequantize_rows(self, plane: int, rows: torch.Tensor) -> torch.Tensor:
        """[num_rows, block_size, head_dim] float32 of keys (`plane` 0) or values (1).

        Args:
            rows: [num_rows] int64, block × num_kv_heads + head each. Only these are read.
        """
        # Whole records: what is not contiguous, torch would copy as a whole before it selects.
        records = self.data[plane].flatten(0, 1).index_select(0, rows)
        gathered = replace(self, data=records)
        return self.form.dequantize(gathered.values, gathered.scales, self.head_dim)

    def _part(self, start: int, row_bytes: int) -> torch.Tensor:
        end = start + self.block_size * row_bytes
        return self.data[..., start:end].view(*self.data.shape[:-1], self.block_size, row_bytes)


KVLayer = torch.Tensor | QuantizedLayer


def block_size_of(kv_layer: KVLayer) -> int:
    """Tokens in a block."""
    return kv_layer.block_size if isinstance(kv_layer, QuantizedLayer) else kv_layer.shape[3]


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
