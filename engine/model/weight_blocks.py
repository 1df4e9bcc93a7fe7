"""Quantized weights as a file has them: groups of 32 with a scale and an offset, never rounded again.

    weight = scale · q + offset                q unsigned, 4 or 8 bits

Knows no file: `gguf_blocks.py` reads them out of one.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

GROUP = 32


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

    def take_rows(self, order: NDArray[np.int64]) -> "WeightBlocks":
        """The same matrix with its rows in another order."""
        return WeightBlocks(self.bits, self.q[order], self.scale[order], self.offset[order])


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
