"""Weights in groups, read out of a GGUF file's blocks without rounding.

Owns the bit layouts of the block types that fit `WeightBlocks` or `NestedBlocks` exactly; others are dequantized by
`gguf.py`. Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h (block_q4_0, block_q4_1, block_q8_0;
block_q4_K, block_q5_K, block_q6_K).
"""

from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from pagedd.engine.model.weight_blocks import NestedBlocks, WeightBlocks


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


def read_nested_blocks(data: NDArray[np.uint8], kind: GGMLQuantizationType) -> NestedBlocks | None:
    """A tensor's bytes, [out, bytes per row], as nested blocks; `None` for a type that has no such form."""
    if kind not in _NESTED_LAYOUTS:
        return None
    blocks = np.ascontiguousarray(data).view(_NESTED_LAYOUTS[kind])  # [out, in / 256]
    num_rows = len(blocks)
    if kind is GGMLQuantizationType.Q6_K:
        q = _six_bits(blocks["low"], blocks["high"]).reshape(num_rows, -1)
        s = blocks["s"].reshape(num_rows, -1)
        # q counts from −32: that is an offset of −32 · d · s.
        with np.errstate(over="ignore"):
            m = blocks["d"] * np.float16(32)
        return _finite(NestedBlocks(8, 16, q, s, s, blocks["d"], m))
    s, t = (part.reshape(num_rows, -1).view(np.int8) for part in _six_bit_scales(blocks["scales"]))
    # Of each 64 weights, the first 32 are in the low nibbles.
    nibbles = blocks["q"].reshape(*blocks.shape, 4, 1, 32)
    q = np.concatenate([nibbles & 15, nibbles >> 4], axis=-2)
    if kind is GGMLQuantizationType.Q5_K:  # bit i of byte j: the highest of weight j of group i
        groups = np.arange(8, dtype=np.uint8).reshape(4, 2, 1)
        q |= (blocks["high"].reshape(*blocks.shape, 1, 1, 32) >> groups & 1) << 4
    bits = 8 if kind is GGMLQuantizationType.Q5_K else 4
    return NestedBlocks(bits, 32, q.reshape(num_rows, -1), s, t, blocks["d"], blocks["m"])


_LAYOUTS: dict[GGMLQuantizationType, Any] = {
    GGMLQuantizationType.Q4_0: np.dtype([("d", "<f2"), ("q", "u1", 16)]),
    GGMLQuantizationType.Q4_1: np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)]),
    GGMLQuantizationType.Q8_0: np.dtype([("d", "<f2"), ("q", "u1", 32)]),
}


_NESTED_LAYOUTS: dict[GGMLQuantizationType, Any] = {
    GGMLQuantizationType.Q4_K: np.dtype([("d", "<f2"), ("m", "<f2"), ("scales", "u1", 12), ("q", "u1", 128)]),
    GGMLQuantizationType.Q5_K: np.dtype(
        [("d", "<f2"), ("m", "<f2"), ("scales", "u1", 12), ("high", "u1", 32), ("q", "u1", 128)]
    ),
    GGMLQuantizationType.Q6_K: np.dtype([("low", "u1", 128), ("high", "u1", 64), ("s", "i1", 16), ("d", "<f2")]),
}


def _six_bit_scales(packed: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """[..., 12] → the 6-bit scales and minima of 8 groups, [..., 8] each.

    Those of the first four groups are whole; of the others the lower four bits share a byte, and the upper two are on
    top of the first ones'.
    """
    first, second, rest = np.split(packed, 3, axis=-1)
    s = np.concatenate([first & 63, (rest & 15) | (first >> 6 << 4)], axis=-1)
    t = np.concatenate([second & 63, (rest >> 4) | (second >> 6 << 4)], axis=-1)
    return s, t


def _six_bits(low: NDArray[np.uint8], high: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[..., 128] nibbles and [..., 64] pairs of upper bits → [..., 256]: each half of 128 weights by itself."""
    outer = low.shape[:-1]
    nibbles = low.reshape(*outer, 2, 1, 64)
    nibbles = np.concatenate([nibbles & 15, nibbles >> 4], axis=-2).reshape(*outer, 2, 4, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8).reshape(4, 1)
    return np.asarray(nibbles | (high.reshape(*outer, 2, 1, 32) >> shifts & 3) << 4).reshape(*outer, 256)


def _finite(blocks: NestedBlocks) -> NestedBlocks | None:
    """`None` when a factor is so large that 32 of it overflow float16."""
    return blocks if np.isfinite(blocks.m).all() else None


def _nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[out, groups, 16] → [out, groups × 32]: a group's first half is in the low nibbles."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)


def _exact(blocks: WeightBlocks) -> WeightBlocks | None:
    """`None` when a scale is so large that its offset overflows float16."""
    return blocks if np.isfinite(blocks.offset).all() else None
