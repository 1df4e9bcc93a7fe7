"""The form in which a quantized weight lies in a GPU's memory, for `triton/linear.py`.

    weight = scale · q + offset        q unsigned, 4 or 8 bits; scale and offset float16, one of each a group of 32

The numbers are those of the file, never rounded again. A row of the matrix is a row of 32-bit words, so a row is read
as one run of memory and splits anywhere between groups. Four words are one 16-byte load, a *unit*: 32 numbers of 4 bits
or 16 of 8. Its number 4 · lane + i lies in word i, at bit `lane · bits`: what a thread extracts with one shift from its
four words is adjacent, and so are the four inputs that it multiplies.
"""

from dataclasses import dataclass

import torch

GROUP = 32  # numbers with one scale
UNIT_WORDS = 4  # of 32 bits in a load


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """One matrix, [out_features, in_features].

    Attributes:
        bits: 4 or 8.
        words: [out_features, in_features × bits / 32] int32.
        scales: [out_features, in_features / 32] int32: two float16, the scale in the low half, the offset in the high.
    """

    bits: int
    out_features: int
    in_features: int
    words: torch.Tensor
    scales: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return self.words.nbytes + self.scales.nbytes

    def dequantize(self) -> torch.Tensor:
        """[out_features, in_features] float32."""
        lanes = torch.arange(32 // self.bits, device=self.words.device, dtype=torch.int32)[:, None] * self.bits
        units = self.words.view(self.out_features, -1, 1, UNIT_WORDS)
        q = (units >> lanes & (1 << self.bits) - 1).view(self.out_features, -1, GROUP)
        scale, offset = self.scales.view(torch.float16).view(self.out_features, -1, 2, 1).float().unbind(2)
        return (q * scale + offset).flatten(1)


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
    lanes = q.view(out_features, -1, 32 // bits, UNIT_WORDS).unbind(2)
    words = torch.zeros(lanes[0].shape, dtype=torch.int32, device=q.device)
    for lane, numbers in enumerate(lanes):
        words |= numbers.to(torch.int32) << (lane * bits)
    pairs = torch.stack([scale, offset], dim=-1).to(torch.float16).view(torch.int32)
    return PackedWeight(bits, out_features, in_features, words.flatten(1), pairs.squeeze(-1))
