"""The shapes that every backend agrees on: the paged KV cache, and a batch's place in it.

The KV cache of one layer is `kv_layer[2, num_blocks, num_kv_heads, block_size, head_dim]`, keys first, then values, or
a `QuantizedLayer`. A *slot* is `block * block_size + offset`; the block table of a sequence maps its logical blocks to
physical ones. Knows nothing of sequences or of who fills the tables: see `engine/batch.py`.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol, TypeGuard

import torch

from pagedd.kernels.kv_form import KVForm

# No backend copies the KV of more slots at a time, unless a single sequence has more: the peak of memory that attention
# needs beside the cache is known, and a batch of long contexts does not need a second copy of its KV.
MAX_GATHERED_SLOTS = 32_768


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedLayer:
    """One layer's cache in a quantized form.

    Attributes:
        planes: keys and values, [num_blocks, num_kv_heads, record_bytes] uint8 each; records as in `kv_form.py`.
        open_keys: [num_pages, num_kv_heads, block_size, head_dim] bfloat16, keys of blocks that are not full; no pages
            unless the form has open keys.
    """

    planes: tuple[torch.Tensor, torch.Tensor]
    form: KVForm
    block_size: int
    head_dim: int
    open_keys: torch.Tensor

    @classmethod
    def filled(
        cls,
        form: KVForm,
        num_blocks: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        byte: int = 0,
        device: torch.device | None = None,
        num_pages: int = 0,
    ) -> "QuantizedLayer":
        """A layer of which every byte is `byte`."""
        keys, values = (
            torch.full(
                (num_blocks, num_kv_heads, form.record_bytes(plane, block_size, head_dim)),
                byte,
                dtype=torch.uint8,
                device=device,
            )
            for plane in range(2)
        )
        pages = torch.full((num_pages, num_kv_heads, block_size, 2 * head_dim), byte, dtype=torch.uint8, device=device)
        return cls((keys, values), form, block_size, head_dim, pages.view(torch.bfloat16))

    def values(self, plane: int) -> torch.Tensor:
        """[num_blocks, num_kv_heads, block_size, value_bytes] of keys (`plane` 0) or values (1), a view."""
        return self._values(self.planes[plane], plane)

    def scales(self, plane: int) -> torch.Tensor:
        """[num_blocks, num_kv_heads, num_scale_rows, scale_bytes], a view."""
        return self._scales(self.planes[plane], plane)

    def write(self, plane: int, blocks: torch.Tensor, offsets: torch.Tensor, x: torch.Tensor) -> None:
        """Quantizes rows, of a form that quantizes them one by one.

        Args:
            blocks, offsets: [num_tokens] int64, where each token's row belongs.
            x: [num_tokens, num_kv_heads, head_dim].
        """
        values, scales = self.form.rows[plane].quantize(x)
        self.values(plane)[blocks, :, offsets] = values
        self.scales(plane)[blocks, :, offsets] = scales

    def close(self, blocks: torch.Tensor, pages: torch.Tensor) -> None:
        """Quantizes the open keys of `pages` into `blocks`, [n] each, which are full."""
        values, scales = self.form.rows[0].quantize(self.open_keys[pages])
        self.values(0)[blocks] = values
        self.scales(0)[blocks] = scales

    def dequantize(self, plane: int) -> torch.Tensor:
        """[num_blocks, num_kv_heads, block_size, head_dim] float32 of keys (`plane` 0) or values (1)."""
        return self.form.rows[plane].dequantize(self.values(plane), self.scales(plane), self.head_dim)

    def dequantize_rows(self, plane: int, rows: torch.Tensor) -> torch.Tensor:
        """[num_rows, block_size, head_dim] float32 of keys (`plane` 0) or values (1).

        Args:
            rows: [num_rows] int64, block × num_kv_heads + head each. Only these are read.
        """
        # Whole records: what is not contiguous, torch would copy as a whole before it selects.
        records = self.planes[plane].flatten(0, 1).index_select(0, rows)
        values, scales = self._values(records, plane), self._scales(records, plane)
        return self.form.rows[plane].dequantize(values, scales, self.head_dim)

    def _values(self, records: torch.Tensor, plane: int) -> torch.Tensor:
        return _rows(records, 0, self.block_size, self.form.rows[plane].value_bytes(self.head_dim))

    def _scales(self, records: torch.Tensor, plane: int) -> torch.Tensor:
        rows = self.form.rows[plane]
        start = self.block_size * rows.value_bytes(self.head_dim)
        return _rows(records, start, rows.num_scale_rows(self.block_size), rows.scale_bytes(self.head_dim))


def _rows(records: torch.Tensor, start: int, num_rows: int, row_bytes: int) -> torch.Tensor:
    return records[..., start : start + num_rows * row_bytes].view(*records.shape[:-1], num_rows, row_bytes)


KVLayer = torch.Tensor | QuantizedLayer


def has_open_keys(kv_layer: KVLayer) -> TypeGuard[QuantizedLayer]:
    """Whether its form keeps the keys of a block in a page until the block is full."""
    return isinstance(kv_layer, QuantizedLayer) and kv_layer.form.has_open_keys


def planes_of(kv_layer: KVLayer) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, as they lie in memory."""
    keys, values = kv_layer.planes if isinstance(kv_layer, QuantizedLayer) else kv_layer.unbind()
    return keys, values


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
        open_slots: [num_tokens] int64; page × block_size + offset of each row's own key while its block is open. Empty
            unless the cache's form has open keys.
        open_tables: [num_seqs, max_num_pages]; the pages of a sequence's blocks, from its first query's block on.
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
    @property
    def open_slots(self) -> torch.Tensor: ...
    @property
    def open_tables(self) -> torch.Tensor: ...
