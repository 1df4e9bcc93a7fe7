"""Quantized weights as they are: groups of 32 with a scale and an offset, read out of GGUF blocks without rounding.

    weight = scale · q + offset                q unsigned, 4 or 8 bits

Owns the bit layouts of the block types that fit this exactly; others are dequantized by `gguf.py`. Layouts:
https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h (block_q4_0, block_q4_1, block_q8_0).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
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


def read_blocks(data: NDArray[np.uint8], kind: GGMLQuantizationType) -> WeightBlocks | None:
    """A tensor's bytes, [out, bytes per row], as blocks; `None` for a type that does not fit the form exactly."""
    if kind not in _LAYOUTS:
        return None
    blocks = np.ascontiguousarray(data).view(_LAYOUTS[kind])  # [out, in / 32]
    scale = blocks["d"]
    if kind is GGMLQuantizationType.Q4_1:
        return WeightBlocks(4, _nibbles(blocks["q"]), scale, blocks["m"])
    if kind is GGMLQuantizationType.Q4_0:
        return _exact(WeightBlocks(4, _nibbles(blocks["q"]), scale, scale * np.float16(-8)))
    q = (blocks["q"].view(np.uint8) ^ 0x80).reshape(len(blocks), -1)  # signed to unsigned: + 128
    return _exact(WeightBlocks(8, q, scale, scale * np.float16(-128)))


_LAYOUTS: dict[GGMLQuantizationType, Any] = {
    GGMLQuantizationType.Q4_0: np.dtype([("d", "<f2"), ("q", "u1", 16)]),
    GGMLQuantizationType.Q4_1: np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)]),
    GGMLQuantizationType.Q8_0: np.dtype([("d", "<f2"), ("q", "u1", 32)]),
}


def _nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[out, groups, 16] → [out, groups × 32]: a group's first half is in the low nibbles."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)


def _exact(blocks: WeightBlocks) -> WeightBlocks | None:
    """`None` when a scale is so large that its offset overflows float16."""
    return blocks if np.isfinite(blocks.offset).all() else None
