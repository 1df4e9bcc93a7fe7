"""The form in which a quantized weight lies in a GPU's memory, for `triton/linear.py`.

    weight = scale · q + offset        q unsigned, 4 or 8 bits

The numbers are those of the file, never rounded again. A row of the matrix is a row of 32-bit words, so a row is read
as one run of memory and splits anywhere between groups. Four words are one 16-byte load, a *unit*: 32 numbers of 4 bits
or 16 of 8. Its number 4 · lane + i lies in word i, at bit `lane · bits`: what a thread extracts with one shift from its
four words is adjacent, and so are the four inputs that it multiplies.

Scales come in two forms. Plain ones are two float16, a scale and an offset for each group of 32. *Nested* ones, of what
llama.cpp calls K-quants, are scale = d · s and offset = −m · t: s and t signed 8 bits, of a group of 32 or 16; d and m
float16, of each 256 numbers. Both products are exact in float32.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

GROUP = 32  # numbers with one plain scale
SUPER_GROUP = 256  # numbers whose nested scales have a factor in common
UNIT_WORDS = 4  # of 32 bits in a load


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """One matrix, [out_features, in_features].

    Attributes:
        bits: 4 or 8.
        words: [out_features, in_features × bits / 32] int32.
        scales: [out_features, in_features / 32] int32: two float16, the scale in the low half, the offset in the high.
            Nested: [out_features, in_features / group / 2] int32: s and t of one group in the low half, of the next in
            the high one, s in the lower byte.
        group: numbers with one scale.
        factors: of nested scales, [out_features, in_features / 256] int32: two float16, d in the low half, m above.
    """

    bits: int
    out_features: int
    in_features: int
    words: torch.Tensor
    scales: torch.Tensor
    group: int = GROUP
    factors: torch.Tensor | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that it holds, each with a row for a row of the matrix."""
        return [self.words, self.scales] + ([] if self.factors is None else [self.factors])

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def with_rows(self, out_features: int) -> "PackedWeight":
        """A matrix of the same form with so many rows, which nobody has written yet."""
        words, scales, *factors = (tensor.new_empty(out_features, tensor.shape[1]) for tensor in self.tensors)
        return replace(
            self, out_features=out_features, words=words, scales=scales, factors=factors[0] if factors else None
        )

    def to(self, device: torch.device) -> "PackedWeight":
        factors = None if self.factors is None else self.factors.to(device)
        return replace(self, words=self.words.to(device), scales=self.scales.to(device), factors=factors)

    def dequantize(self) -> torch.Tensor:
        """[out_features, in_features] float32."""
        lanes = torch.arange(32 // self.bits, device=self.words.device, dtype=torch.int32)[:, None] * self.bits
        units = self.words.view(self.out_features, -1, 1, UNIT_WORDS)
        q = (units >> lanes & (1 << self.bits) - 1).view(self.out_features, -1, self.group)
        scale, offset = self._scales_and_offsets()
        return (q * scale[..., None] + offset[..., None]).flatten(1)

    def _scales_and_offsets(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Each [out_features, in_features / group] float32."""
        if self.factors is None:
            scale, offset = self.scales.view(torch.float16).view(self.out_features, -1, 2).float().unbind(2)
            return scale, offset
        d, m = self.factors.view(torch.float16).view(self.out_features, -1, 1, 2).float().unbind(3)
        pairs = self.scales.view(torch.int8).view(self.out_features, -1, SUPER_GROUP // self.group, 2).float()
        return (d * pairs[..., 0]).flatten(1), -(m * pairs[..., 1]).flatten(1)


def pack_weight(q: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor, bits: int) -> PackedWeight:
    """
    Args:
        q: [out_features, in_features] uint8, below 2^bits.
        scale, offset: [out_features, in_features / 32] float16.
        bits: 4 or 8.

    Raises:
        ValueError: other bits, or rows that are not whole groups of 32.
    """
    out_features, in_features = q.shape
    if bits not in (4, 8):
        raise ValueError(f"weights of {bits} bits; 4 or 8 can be packed")
    if in_features % GROUP or scale.shape != (out_features, in_features // GROUP) or offset.shape != scale.shape:
        raise ValueError(
            f"weight {list(q.shape)} with scales {list(scale.shape)} and offsets {list(offset.shape)}; "
            f"rows have to be groups of {GROUP}, with one of each a group"
        )
    pairs = torch.stack([scale, offset], dim=-1).to(torch.float16).view(torch.int32)
    return PackedWeight(bits, out_features, in_features, _pack_numbers(q, bits), pairs.squeeze(-1))


def pack_nested_weight(
    q: torch.Tensor, s: torch.Tensor, t: torch.Tensor, d: torch.Tensor, m: torch.Tensor, bits: int
) -> PackedWeight:
    """
    Args:
        q: [out_features, in_features] uint8, below 2^bits.
        s, t: [out_features, in_features / group] int8, of groups of 16 or 32; of 4 bits of 32.
        d, m: [out_features, in_features / 256] float16.
        bits: 4 or 8.

    Raises:
        ValueError: other bits or groups, or rows that are not whole ones of 256.
    """
    out_features, in_features = q.shape
    group = in_features // s.shape[1]
    if (bits, group) not in {(4, 32), (8, 16), (8, 32)}:
        raise ValueError(f"weights of {bits} bits in groups of {group}; 4 in groups of 32, or 8, can be packed")
    if in_features % SUPER_GROUP or d.shape != (out_features, in_features // SUPER_GROUP):
        raise ValueError(f"weight {list(q.shape)} with factors {list(d.shape)}; rows have to be whole {SUPER_GROUP}s")
    scales = torch.stack([s, t], dim=-1).flatten(1).view(torch.int32)
    factors = torch.stack([d, m], dim=-1).to(torch.float16).view(torch.int32).squeeze(-1)
    return PackedWeight(bits, out_features, in_features, _pack_numbers(q, bits), scales, group, factors)


def join_rows(parts: Iterator[PackedWeight], out_features: int) -> PackedWeight:
    """The rows of all parts, one under another: `out_features` in all. Holds the result and one part at a time."""
    whole: PackedWeight | None = None
    row = 0
    for part in parts:
        if whole is None:
            whole = part.with_rows(out_features)
        for target, source in zip(whole.tensors, part.tensors, strict=True):
            target[row : row + part.out_features] = source
        row += part.out_features
    if whole is None or row != out_features:
        raise ValueError(f"{row} rows of a weight, {out_features} expected")
    return whole


def _pack_numbers(q: torch.Tensor, bits: int) -> torch.Tensor:
    """[out_features, in_features] uint8 → [out_features, in_features × bits / 32] int32."""
    lanes = q.view(q.shape[0], -1, 32 // bits, UNIT_WORDS).unbind(2)
    words = torch.zeros(lanes[0].shape, dtype=torch.int32, device=q.device)
    for lane, numbers in enumerate(lanes):
        words |= numbers.to(torch.int32) << (lane * bits)
    return words.flatten(1)
