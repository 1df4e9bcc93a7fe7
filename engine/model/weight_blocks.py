"""Quantized weights as a file has them, in small groups with scales of their own, never rounded again.

    weight = scale · q + offset                `WeightBlocks`: groups of 32, q unsigned, 4 or 8 bits
    weight = d · s · q − m · t                 `NestedBlocks`: s and t of a group, d and m of 256 weights

Knows no file: `gguf_blocks.py` reads them out of one.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class WeightBlocks:
    """One matrix.

    Attributes:
        bits: 4 or 8.
        q: [out, in] uint8.
        scale, offset: [out, in / 32] float16.
    """

    bits: int
    q: NDArray[np.uint8]
    scale: NDArray[np.float16]
    offset: NDArray[np.float16]

    def take_rows(self, order: NDArray[np.int64] | slice) -> "WeightBlocks":
        """The same matrix with its rows in another order, or a view of some."""
        return WeightBlocks(self.bits, self.q[order], self.scale[order], self.offset[order])


@dataclass(frozen=True, slots=True)
class NestedBlocks:
    """One matrix of what llama.cpp calls K-quants.

    Attributes:
        bits: that q is stored in, 4 or 8.
        group: weights with one s and t, 32 or 16.
        q: [out, in] uint8.
        s, t: [out, in / group] int8.
        d, m: [out, in / 256] float16.
    """

    bits: int
    group: int
    q: NDArray[np.uint8]
    s: NDArray[np.int8]
    t: NDArray[np.int8]
    d: NDArray[np.float16]
    m: NDArray[np.float16]

    def take_rows(self, order: NDArray[np.int64] | slice) -> "NestedBlocks":
        """The same matrix with its rows in another order, or a view of some."""
        parts = (self.q[order], self.s[order], self.t[order], self.d[order], self.m[order])
        return NestedBlocks(self.bits, self.group, *parts)

    def with_groups_of(self, group: int) -> "NestedBlocks":
        """The same matrix in groups that are a part of these."""
        times = self.group // group
        return replace(self, group=group, s=self.s.repeat(times, axis=1), t=self.t.repeat(times, axis=1))


def concatenate_nested(parts: list[NestedBlocks]) -> NestedBlocks:
    """Rows of all parts, which have the same width, in the widest bits and the smallest groups among them."""
    bits, group = max(part.bits for part in parts), min(part.group for part in parts)
    alike = [part.with_groups_of(group) for part in parts]
    return NestedBlocks(
        bits,
        group,
        np.concatenate([part.q for part in alike]),
        np.concatenate([part.s for part in alike]),
        np.concatenate([part.t for part in alike]),
        np.concatenate([part.d for part in alike]),
        np.concatenate([part.m for part in alike]),
    )


def concatenate(parts: list[WeightBlocks]) -> WeightBlocks:
    """Rows of all parts, which have the same width and bits."""
    return WeightBlocks(
        parts[0].bits,
        np.concatenate([part.q for part in parts]),
        np.concatenate([part.scale for part in parts]),
        np.concatenate([part.offset for part in parts]),
    )


@runtime_checkable
class BlockCheckpoint(Protocol):
    """A checkpoint that may hold matrices in quantized blocks."""

    def __contains__(self, name: str) -> bool: ...
    def blocks(self, name: str) -> WeightBlocks | None: ...
    def nested_blocks(self, name: str) -> NestedBlocks | None: ...
    def is_quantized(self, name: str) -> bool: ...


def stacked_blocks(checkpoint: object, names: Iterable[str]) -> WeightBlocks | None:
    """The rows of all of `names`, where each is in quantized blocks of the same width, else `None`."""
    if not isinstance(checkpoint, BlockCheckpoint):
        return None
    parts = [checkpoint.blocks(name) if name in checkpoint else None for name in names]
    blocks = [part for part in parts if part is not None]
    if len(blocks) < len(parts) or len({(part.bits, part.q.shape[1]) for part in blocks}) > 1:
        return None
    return concatenate(blocks)


def stacked_nested_blocks(checkpoint: object, names: Iterable[str]) -> NestedBlocks | None:
    """The rows of all of `names`, where each is in nested blocks of the same width, else `None`."""
    if not isinstance(checkpoint, BlockCheckpoint):
        return None
    parts = [checkpoint.nested_blocks(name) if name in checkpoint else None for name in names]
    blocks = [part for part in parts if part is not None]
    if len(blocks) < len(parts) or len({part.q.shape[1] for part in blocks}) > 1:
        return None
    return concatenate_nested(blocks)
