"""Weights in groups of 32, read out of a GGUF file's blocks without rounding.

Owns the bit layouts of the block types that fit `WeightBlocks` exactly; others are dequantized by `gguf.py`. Layouts:
https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h (block_q4_0, block_q4_1, block_q8_0).
"""

from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from pagedd.engine.model.weight_blocks import WeightBlocks


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
