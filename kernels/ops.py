"""The public kernels: one function each, answered by a backend that is chosen once, at start-up.

A backend is a module with these functions under these signatures: `reference` (the specification), `torch_ops`, or
`triton` on a GPU. Choosing is explained by `select_backend`; callers never ask which one answers. Shapes are those of
`layout.py`.
"""

import importlib
import os
from dataclasses import dataclass
from typing import Protocol, cast

import torch

from pagedd.kernels import torch_ops
from pagedd.kernels.layout import KVLayer, PagedBatch, QuantizedLayer
from pagedd.kernels.packed_weight import PackedWeight

BACKEND_VARIABLE = "PAGEDD_KERNELS"


class Backend(Protocol):
    """What a backend module provides; each function's meaning is documented once, on the public one below."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...
    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor: ...
    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_layer: KVLayer,
        slot_mapping: torch.Tensor,
        open_slots: torch.Tensor | None = None,
    ) -> None: ...
    def close_blocks(self, kv_layer: QuantizedLayer, batch: PagedBatch) -> None: ...
    def rope_and_write_kv(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv_layer: KVLayer,
        slot_mapping: torch.Tensor,
        open_slots: torch.Tensor | None = None,
    ) -> None: ...
    def packed_linear(self, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor: ...
    def keep_best(
        self, logits: torch.Tensor, weights: torch.Tensor, limits: torch.Tensor, shares: torch.Tensor
    ) -> None: ...
    def paged_attention(
        self,
        query: torch.Tensor,
        kv_layer: KVLayer,
        batch: PagedBatch,
        *,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """Which backend answers, and why.

    Attributes:
        can_be_captured: it never waits for the device, so its launches can become a CUDA graph.
        compiles_at_first_launch: a launch of a new kind takes seconds, so each has to be made before serving.
        gathers_kv: attention needs room for a copy of the keys and values that it reads.
        sorts_logits: `keep_best` needs room for a vocabulary in its order.
        keeps_weights_packed: `packed_linear` reads 4 or 8 bits a number, so it pays to leave them as they are.
    """

    name: str
    reason: str
    can_be_captured: bool = False
    compiles_at_first_launch: bool = False
    keeps_weights_packed: bool = False
    gathers_kv: bool = True
    sorts_logits: bool = True


_MODULES = {
    "reference": "pagedd.kernels.reference",
    "torch": "pagedd.kernels.torch_ops",
    "triton": "pagedd.kernels.triton.backend",
}
_active: Backend = torch_ops


def select_backend(device: torch.device) -> BackendChoice:
    """Chooses the backend for `device`; the environment variable PAGEDD_KERNELS overrides it.

    Raises:
        ValueError: PAGEDD_KERNELS names no backend, or one that does not run on `device`.
    """
    global _active
    asked = os.environ.get(BACKEND_VARIABLE)
    name, reason = _built_for(device) if asked is None else (asked, f"{BACKEND_VARIABLE}={asked} asks for it")
    if name not in _MODULES:
        raise ValueError(f"{BACKEND_VARIABLE}={name!r}: no such backend; choose one of {', '.join(_MODULES)}")
    try:
        # Only what is used is imported: triton takes its time, and a machine without a GPU need not have it.
        module = importlib.import_module(_MODULES[name])
    except ImportError as error:
        if asked is not None:
            raise ValueError(f"{BACKEND_VARIABLE}={name!r}: {error}") from error
        module, name, reason = torch_ops, "torch", f"Triton's kernels cannot be imported: {error}"
    if name == "triton" and device.type != "cuda" and not module.IS_INTERPRETED:
        raise ValueError(f"{BACKEND_VARIABLE}={name!r} on {device}: Triton needs a GPU, or TRITON_INTERPRET=1")
    _active = cast(Backend, module)
    is_triton = name == "triton"
    return BackendChoice(
        name,
        reason,
        can_be_captured=is_triton and device.type == "cuda",
        compiles_at_first_launch=is_triton and device.type == "cuda",
        keeps_weights_packed=is_triton,
        gathers_kv=not is_triton,
        sorts_logits=not is_triton,
    )


def _built_for(device: torch.device) -> tuple[str, str]:
    if device.type == "cuda":
        return "triton", "its kernels are the ones built for GPUs"
    return "torch", f"the vectorised torch path is the one built for {device.type}"


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension (Zhang and Sennrich 2019).

    Args:
        x: [..., size], any float dtype; the result has its shape and dtype.
        weight: [size].
    """
    return _active.rms_norm(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of `x` and `residual`, normalised, and the sum itself: (rms_norm(x + residual), x + residual)."""
    return _active.add_rms_norm(x, residual, weight, eps)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """SwiGLU's middle (Shazeer 2020): [..., 2 × size] → [..., size], silu of the first half times the second."""
    return _active.silu_and_mul(x)


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_layer: KVLayer,
    slot_mapping: torch.Tensor,
    open_slots: torch.Tensor | None = None,
) -> None:
    """Stores each row's key and value in its slot, in the form of the cache; an open key in its page.

    Args:
        key, value: [num_tokens, num_kv_heads, head_dim], any float dtype.
        kv_layer: [2, num_blocks, num_kv_heads, block_size, head_dim], or quantized; written in place.
        slot_mapping: [num_tokens] int64, no slot twice; but rows that only pad a batch may share slots that none but
            they read: which of them is left there is open.
        open_slots: as in `PagedBatch`; where the form of the cache has open keys. `close_blocks` has to follow then.
    """
    _active.write_kv(key, value, kv_layer, slot_mapping, open_slots)


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
    """Rotates `query` in place (Su et al. 2021, in the half-split order of transformers), and stores the rotated key.

    What becomes of `key` itself is left open: nobody reads it again.

    Args:
        query: [num_tokens, num_heads, head_dim]; like key and value it may be a view into a wider row.
        key, value, kv_layer, slot_mapping, open_slots: as in `write_kv`.
        cos, sin: [num_tokens, head_dim // 2] float32, of each token's position times the inverse frequencies.
    """
    _active.rope_and_write_kv(query, key, value, cos, sin, kv_layer, slot_mapping, open_slots)


def close_blocks(kv_layer: QuantizedLayer, batch: PagedBatch) -> None:
    """Quantizes the keys of the blocks that the batch's tokens fill, out of their pages.

    Args:
        kv_layer: of a form with open keys; all keys of the batch are written.
    """
    _active.close_blocks(kv_layer, batch)


def packed_linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """x · weightᵀ + bias, with the weight's numbers as a quantized file has them.

    Args:
        x: [num_rows, in_features], any float dtype; the numbers of a row lie together.
        bias: [out_features], any float dtype.

    Returns:
        [num_rows, out_features] in the dtype of `x`.
    """
    return _active.packed_linear(x, weight, bias)


def paged_attention(
    query: torch.Tensor,
    kv_layer: KVLayer,
    batch: PagedBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Causal attention of every row over the cached keys of its own sequence (PagedAttention, Kwon et al. 2023).

    Args:
        query: [num_tokens, num_heads, head_dim]; the result has its shape and dtype.
        kv_layer: [2, num_blocks, num_kv_heads, block_size, head_dim], or quantized; the batch's own keys are already
            written. Products are taken in its dtype; in the query's where it is quantized.
        scale: multiplies the dot products.
        sliding_window: a row at position p sees keys p − sliding_window + 1 … p; None sees all up to p.
        soft_cap: scores s become soft_cap · tanh(s / soft_cap) before the softmax (Gemma 2).
    """
    return _active.paged_attention(
        query, kv_layer, batch, scale=scale, sliding_window=sliding_window, soft_cap=soft_cap
    )


def keep_best(logits: torch.Tensor, weights: torch.Tensor, limits: torch.Tensor, shares: torch.Tensor) -> None:
    """Top-k and top-p: sets `weights` to 0 outside each row's limit and share, in place.

    Tokens are ordered by logit, equal ones by ascending id. Kept are the first `limit` of them, and of those the fewest
    that hold at least `share` of their weight; always one.

    Args:
        logits: [num_rows, vocab_size] float32, contiguous.
        weights: [num_rows, vocab_size] int64, contiguous; not negative, not ascending where logits descend.
        limits: [num_rows] int64, at least 1; the vocabulary's size or more keeps all.
        shares: [num_rows] float64; 1 or more keeps all.
    """
    _active.keep_best(logits, weights, limits, shares)
