"""The public kernels: one function each, answered by a backend that is chosen once, at start-up.

A backend is a module with these functions under these signatures: `reference` (the specification) or `torch_ops`.
Choosing is explained by `select_backend`; callers never ask which one answers. Shapes are those of `layout.py`.
"""

import os
from dataclasses import dataclass
from typing import Protocol

import torch

from pagedd.kernels import reference, torch_ops
from pagedd.kernels.layout import KVLayer, PagedBatch

BACKEND_VARIABLE = "PAGEDD_KERNELS"


class Backend(Protocol):
    """What a backend module provides; each function's meaning is documented once, on the public one below."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...
    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def apply_rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None: ...
    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor: ...
    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_layer: KVLayer, slot_mapping: torch.Tensor
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
    """

    name: str
    reason: str
    can_be_captured: bool = False


_BACKENDS: dict[str, Backend] = {"reference": reference, "torch": torch_ops}
_active: Backend = torch_ops


def select_backend(device: torch.device) -> BackendChoice:
    """Chooses the backend for `device`; the environment variable PAGEDD_KERNELS overrides it.

    Raises:
        ValueError: PAGEDD_KERNELS names no backend.
    """
    global _active
    asked = os.environ.get(BACKEND_VARIABLE)
    if asked is None:
        choice = BackendChoice("torch", f"the vectorised torch path is the one built for {device.type}")
    elif asked in _BACKENDS:
        choice = BackendChoice(asked, f"{BACKEND_VARIABLE}={asked} asks for it")
    else:
        raise ValueError(f"{BACKEND_VARIABLE}={asked!r}: no such backend; choose one of {', '.join(_BACKENDS)}")
    _active = _BACKENDS[choice.name]
    return choice


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


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotates the heads of `x` in place (Su et al. 2021, in the half-split order of transformers).

    Args:
        x: [num_tokens, num_heads, head_dim]; may be a view into a wider row.
        cos, sin: [num_tokens, head_dim // 2] float32, of each token's position times the inverse frequencies.
    """
    _active.apply_rope(x, cos, sin)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """SwiGLU's middle (Shazeer 2020): [..., 2 × size] → [..., size], silu of the first half times the second."""
    return _active.silu_and_mul(x)


def write_kv(key: torch.Tensor, value: torch.Tensor, kv_layer: KVLayer, slot_mapping: torch.Tensor) -> None:
    """Stores each row's key and value in its slot, in the form of the cache.

    Args:
        key, value: [num_tokens, num_kv_heads, head_dim], any float dtype.
        kv_layer: [2, num_blocks, num_kv_heads, block_size, head_dim], or quantized; written in place.
        slot_mapping: [num_tokens] int64, no slot twice.
    """
    _active.write_kv(key, value, kv_layer, slot_mapping)


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
