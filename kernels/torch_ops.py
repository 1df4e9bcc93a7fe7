"""The vectorised torch backend: serves on a CPU, and on any device that has no backend of its own.

Attention gathers a sequence's blocks into contiguous keys and values. The query heads that share a KV head are the rows
of one matrix, so that keys are never repeated. Decodes go together in a few batched products; prefill chunks go one
sequence at a time, in tiles of rows, so that the scores stay in cache and a causal tile skips the keys after it (two
to three times as quick in bfloat16 as `scaled_dot_product_attention` on AVX-512). What depends on the step alone (which
blocks, which mask) is worked out once (`attention_plan.py`) and used by all layers. Signatures are those of `ops.py`.

Scores are rounded to the dtype of a float cache, or of the query where the cache is quantized, and the softmax is taken
in float32. Of a quantized cache only the gathered blocks are dequantized.
"""

import functools

import torch
import torch.nn.functional as F

from pagedd.kernels.attention_plan import Decodes, plan
from pagedd.kernels.layout import (
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
    for part in plan(batch, num_kv_heads, block_size, sliding_window):
        k, v = (
            _gather(kv_layer, plane, part.block_rows, query.dtype).view(-1, part.num_slots, head_dim)
            for plane in range(2)
        )
        open_keys = _gather_open(kv_layer, part.open_pages, query.dtype)
        if isinstance(part, Decodes):
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
    """Blocks of keys (`plane` 0) or values (1) in the float dtype; `rows` are `block_rows` of a plan."""
    if isinstance(kv_layer, QuantizedLayer):
        return kv_layer.dequantize_rows(plane, rows).to(dtype)
    return kv_layer[plane].flatten(0, 1).index_select(0, rows)


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
