"""Every kernel as plain loops: the specification that the other backends are tested against. Slow, exact, any device.

Sums are taken in float64 and rounded once, to the dtype of the input, so that a difference is the other backend's.
Signatures are those of `ops.py`; shapes are explained in `layout.py`.
"""

import math

import torch

from pagedd.kernels.layout import KVLayer, PagedBatch, QuantizedLayer, block_size_of, has_open_keys
from pagedd.kernels.packed_weight import PackedWeight


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """y = x / sqrt(mean(x²) + eps) · weight, over the last dimension."""
    wide = x.double()
    mean_square = (wide * wide).sum(dim=-1, keepdim=True) / x.shape[-1]
    return (wide / torch.sqrt(mean_square + eps) * weight.double()).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (rms_norm(x + residual), x + residual)."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotates, in place, the pairs (x[d], x[d + half]) of every head by the row's angle d."""
    half = x.shape[-1] // 2
    for row in range(x.shape[0]):
        for head in range(x.shape[1]):
            for d in range(half):
                # As numbers: a float64 element would be a view, and change under the assignments below.
                first, second = float(x[row, head, d]), float(x[row, head, d + half])
                c, s = float(cos[row, d]), float(sin[row, d])
                x[row, head, d] = first * c - second * s
                x[row, head, d + half] = second * c + first * s


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up, where gate is the first half of the last dimension and up the second."""
    gate, up = x.double().chunk(2, dim=-1)
    return (gate / (1 + torch.exp(-gate)) * up).to(x.dtype)


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_layer: KVLayer,
    slot_mapping: torch.Tensor,
    open_slots: torch.Tensor | None = None,
) -> None:
    block_size = block_size_of(kv_layer)
    for row, slot in enumerate(slot_mapping.tolist()):
        block, offset = divmod(slot, block_size)
        for plane, x in enumerate((key, value)):
            if open_slots is not None and plane == 0 and has_open_keys(kv_layer):
                page, open_offset = divmod(int(open_slots[row]), block_size)
                kv_layer.open_keys[page, :, open_offset] = x[row].bfloat16()
            elif isinstance(kv_layer, QuantizedLayer):
                values, scales = kv_layer.form.rows[plane].quantize(x[row])
                kv_layer.values(plane)[block, :, offset] = values
                kv_layer.scales(plane)[block, :, offset] = scales
            else:
                kv_layer[plane, block, :, offset] = x[row]


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
    starts = batch.query_starts.tolist()
    for i, context_len in enumerate(batch.context_lens.tolist()):
        first = (context_len - starts[i + 1] + starts[i]) // kv_layer.block_size
        for j in range(first, context_len // kv_layer.block_size):
            kv_layer.close(
                batch.block_tables[i, j : j + 1].long(), batch.open_tables[i, j - first : j - first + 1].long()
            )


def packed_linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    wide = x.double() @ weight.dequantize().double().T
    return (wide if bias is None else wide + bias.double()).to(x.dtype)


def paged_attention(
    query: torch.Tensor,
    kv_layer: KVLayer,
    batch: PagedBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Each query row in turn looks at each visible key in turn.

    With p the row's position, key j is visible when j <= p and, under a sliding window, p − j < sliding_window. Where
    the cache has open keys, those of the row's own block, p // block_size, are the ones in its page.
    """
    block_size = block_size_of(kv_layer)
    open_keys = kv_layer.open_keys if has_open_keys(kv_layer) else None
    if isinstance(kv_layer, QuantizedLayer):
        kv_layer = torch.stack([kv_layer.dequantize(plane) for plane in range(2)])
    group_size = query.shape[1] // kv_layer.shape[2]  # query heads that share one KV head
    output = torch.empty_like(query)
    starts = batch.query_starts.tolist()
    for i, context_len in enumerate(batch.context_lens.tolist()):
        for row in range(starts[i], starts[i + 1]):
            position = context_len - (starts[i + 1] - row)
            first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            for head in range(query.shape[1]):
                scores, values = [], []
                for j in range(first, position + 1):
                    block = int(batch.block_tables[i, j // block_size])
                    key, value = kv_layer[:, block, head // group_size, j % block_size].double()
                    if open_keys is not None and j // block_size == position // block_size:
                        first_block = (context_len - (starts[i + 1] - starts[i])) // block_size
                        page = int(batch.open_tables[i, j // block_size - first_block])
                        key = open_keys[page, head // group_size, j % block_size].double()
                    score = float(query[row, head].double() @ key) * scale
                    scores.append(score if soft_cap is None else soft_cap * math.tanh(score / soft_cap))
                    values.append(value)
                weights = torch.softmax(torch.tensor(scores, dtype=torch.float64, device=query.device), dim=0)
                output[row, head] = (weights[:, None] * torch.stack(values)).sum(dim=0)
    return output


def keep_best(logits: torch.Tensor, weights: torch.Tensor, limits: torch.Tensor, shares: torch.Tensor) -> None:
    """Each row's tokens in turn, by descending logit and then ascending id, until one of the bounds is reached."""
    for row, limit in enumerate(limits.tolist()):
        ranked = sorted(range(logits.shape[1]), key=lambda token: (-float(logits[row, token]), token))
        kept = ranked[:limit]
        total = sum(int(weights[row, token]) for token in kept)
        share = float(shares[row])
        wanted = math.ceil(share * total) if share < 1 else total
        reached = 0
        for rank, token in enumerate(ranked):
            if rank >= limit or (rank > 0 and reached >= wanted):
                weights[row, token] = 0
            else:
                reached += int(weights[row, token])
