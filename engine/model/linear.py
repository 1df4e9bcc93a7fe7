"""Matrix products with a model's weights. The decoder does not ask how a `Linear` stores them.

Another storage form joins by adding a class with the same call here and naming it in `make_linear`.
"""

from typing import Protocol

import torch
import torch.nn.functional as F

from pagedd.engine.model.weight_blocks import NestedBlocks, WeightBlocks
from pagedd.kernels import ops
from pagedd.kernels.packed_weight import PackedWeight, join_rows, pack_nested_weight, pack_weight

# Packing takes some 5 bytes a number on the device for a moment: of so many numbers at a time, or a model whose head
# comes last would need gigabytes more than it keeps.
_PACKED_AT_ONCE = 1 << 23


class Linear(Protocol):
    """y = x · weightᵀ + bias.

    Attributes:
        num_bytes: what the weight and bias take in memory.
    """

    num_bytes: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, in_features] → [num_tokens, out_features], same dtype."""
        ...


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """The quickest form for the weight's device and dtype. `weight`: [out_features, in_features]."""
    if weight.device.type == "cpu" and _can_pack(weight.dtype):
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)


class QuantizedLinear:
    """The weight as a file quantizes it, in 4 or 8 bits, for a backend that multiplies it as it is."""

    def __init__(self, blocks: WeightBlocks | NestedBlocks, bias: torch.Tensor | None, device: torch.device) -> None:
        self._weight = _pack(blocks, device)
        self._bias = bias
        self.num_bytes = self._weight.num_bytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return ops.packed_linear(x, self._weight, self._bias)


def _pack(blocks: WeightBlocks | NestedBlocks, device: torch.device) -> PackedWeight:
    """In slices of rows: memory for what is kept and for one slice."""
    num_rows, in_features = blocks.q.shape
    step = max(1, _PACKED_AT_ONCE // in_features)
    slices = (blocks.take_rows(slice(row, row + step)) for row in range(0, num_rows, step))
    return join_rows((_pack_slice(part, device) for part in slices), num_rows)


def _pack_slice(blocks: WeightBlocks | NestedBlocks, device: torch.device) -> PackedWeight:
    if isinstance(blocks, WeightBlocks):
        q, scale, offset = (torch.from_numpy(part).to(device) for part in (blocks.q, blocks.scale, blocks.offset))
        return pack_weight(q, scale, offset, blocks.bits)
    parts = (blocks.q, blocks.s, blocks.t, blocks.d, blocks.m)
    q, s, t, d, m = (torch.from_numpy(part).to(device) for part in parts)
    return pack_nested_weight(q, s, t, d, m, blocks.bits)


class PlainLinear:
    """The weight as it came."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias
        self.num_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)


class PackedLinear:
    """The weight in oneDNN's blocked layout.

    On two cores with AVX-512 it takes half the time of a plain product in float32; in bfloat16 from 0.65 (one row) to
    0.93 (512 rows) of it.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self._bias = bias
        self.num_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")  # type: ignore[no-any-return]


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32
