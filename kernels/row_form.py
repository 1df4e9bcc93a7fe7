"""How rows of numbers are quantized: bytes, and scales beside them. The specification.

A row is one head's key or value of one token, [head_dim].

    int8   scale = max |x| / 127, x ≈ q · scale; one scale a row
    fp8    scale = max |x| / 448, x ≈ e4m3(x / scale) · scale; one scale a row
    int4   groups of 32 of the row's dimensions, the last of which may be shorter: offset = min x,
           scale = (max x − offset) / 15, x ≈ offset + q · scale; a scale and an offset a group; byte i holds
           dimension 2i in its low half and 2i + 1 in its high one
    channel4  the same steps and bytes, but a group is one dimension of all rows of a block, since a few dimensions of
           keys are far larger than the rest. A scale and an offset a dimension, for the block, whose rows are
           quantized together

Scales and offsets are bfloat16: they need a float32's range (values of 1e-6 and 1e5 survive, which float16 would lose)
and little of its precision, since they are rounded first, the offset downwards, and values are quantized against what
was rounded. A row (of 4 bits, a group) with NaN or infinity gets NaN as its scale, so it never reads as plausible
numbers.

What reads and writes the same in C++ is `cpu/kv_rows.h` and `cpu/kv_quantize.h`. Which forms a cache is made of is in
`kv_form.py`.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

GROUP = 32  # dimensions of an int4 group
_NAN = 0x7FC0  # as bfloat16
_SMALLEST_NORMAL = 2.0**-126  # a smaller scale is 0: its inverse would not be finite
_LIMITS = {"int8": 127.0, "fp8": 448.0}


@dataclass(frozen=True, slots=True)
class RowForm:
    """`name`: int8, fp8, int4 or channel4."""

    name: str

    @property
    def needs_whole_block(self) -> bool:
        """Whether the rows of a block are quantized together; until then they are kept elsewhere, in 16 bits."""
        return self.name == "channel4"

    def value_bytes(self, head_dim: int) -> int:
        """Of one row."""
        return head_dim if self.name in _LIMITS else -(-head_dim // 2)

    def scale_bytes(self, head_dim: int) -> int:
        """Of one row; of a whole block where rows are quantized together."""
        if self.needs_whole_block:
            return 4 * head_dim
        return 4 * _num_groups(head_dim) if self.name == "int4" else 2

    def num_scale_rows(self, block_size: int) -> int:
        """How many `scale_bytes` a block has."""
        return 1 if self.needs_whole_block else block_size

    def quantize(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[..., head_dim] of any float dtype → uint8 values [..., value_bytes] and scales [..., scale_bytes].

        Of rows that are quantized together, [..., block_size, head_dim], scales are [..., 1, scale_bytes].
        """
        x = x.float()
        if self.needs_whole_block:
            return _quantize_channels(x)
        if self.name == "int4":
            return _quantize_int4(x)
        limit = _LIMITS[self.name]
        scale, inverse = _step(x.abs().amax(dim=-1), 1 / limit, x.isfinite().all(dim=-1))
        scaled = (x * inverse[..., None]).clamp(-limit, limit)
        # Infinity times an inverse of 0 is NaN; such a row is NaN by its scale.
        scaled = torch.where(inverse[..., None] == 0, 0.0, scaled)
        values = scaled.round().to(torch.int8) if self.name == "int8" else scaled.to(torch.float8_e4m3fn)
        return values.view(torch.uint8), scale[..., None].contiguous().view(torch.uint8)

    def dequantize(self, values: torch.Tensor, scales: torch.Tensor, head_dim: int) -> torch.Tensor:
        """The reverse of `quantize`, as float32 [..., head_dim]."""
        steps = scales.contiguous().view(torch.bfloat16).float()
        if self.needs_whole_block:
            scale, offset = steps.view(*steps.shape[:-1], head_dim, 2).unbind(-1)
            return _unpack(values)[..., :head_dim].float().mul_(scale).add_(offset)
        if self.name == "int4":
            return _dequantize_int4(values, steps.view(*steps.shape[:-1], -1, 2), head_dim)
        numbers = values.view(torch.int8 if self.name == "int8" else torch.float8_e4m3fn)
        return numbers.float().mul_(steps)


def _num_groups(head_dim: int) -> int:
    return -(-head_dim // GROUP)


def _step(width: torch.Tensor, per_step: float, is_finite: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale that spreads `width` over its steps, as bits of bfloat16, and the inverse of what was rounded.

    The inverse is 0 where every value becomes 0: of a scale that is 0 or NaN.
    """
    scale = width * per_step
    is_finite = is_finite & scale.isfinite()
    rounded = torch.where(is_finite, scale, 0.0).bfloat16()
    rounded = torch.where(rounded < _SMALLEST_NORMAL, 0.0, rounded)
    wide = rounded.float()
    inverse = torch.where(wide > 0, 1 / wide, 0.0)
    return torch.where(is_finite, rounded.view(torch.int16), _NAN).to(torch.int16), inverse


def _quantize_int4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    head_dim = x.shape[-1]
    num_missing = _num_groups(head_dim) * GROUP - head_dim
    # The last dimension again and again: that changes no group's range.
    padded = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], num_missing)], dim=-1)
    q, steps = _quantize_groups(padded.view(*x.shape[:-1], -1, GROUP))
    return _pack(q.flatten(-2)[..., :head_dim]), steps.flatten(-2).view(torch.uint8)


def _quantize_channels(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q, steps = _quantize_groups(x.transpose(-1, -2))
    return _pack(q.transpose(-1, -2)), steps.flatten(-2).view(torch.uint8)[..., None, :]


def _quantize_groups(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., n] → numbers below 16 as uint8, the same shape, and [..., 2] int16, scale and offset as bfloat16."""
    is_finite = groups.isfinite().all(dim=-1)
    lowest = torch.where(is_finite, groups.amin(dim=-1), 0.0) + 0.0  # + 0: no negative zero
    bits = lowest.view(torch.int32)
    offset = ((bits >> 16) + ((bits < 0) & ((bits & 0xFFFF) != 0))).to(torch.int16)  # rounded down
    base = offset.view(torch.bfloat16).float()
    scale, inverse = _step(groups.amax(dim=-1) - base, 1 / 15, is_finite)
    q = ((groups - base[..., None]) * inverse[..., None]).round().clamp(0, 15)
    q = torch.where(inverse[..., None] == 0, 0.0, q).to(torch.uint8)
    return q, torch.stack([scale, offset], dim=-1)


def _dequantize_int4(values: torch.Tensor, steps: torch.Tensor, head_dim: int) -> torch.Tensor:
    """`steps`: [..., num_groups, 2], scale and offset."""
    num_groups = _num_groups(head_dim)
    q = _unpack(values)
    q = F.pad(q, (0, num_groups * GROUP - q.shape[-1])).view(*q.shape[:-1], num_groups, GROUP)
    scale, offset = steps[..., None].unbind(-2)
    return q.float().mul_(scale).add_(offset).flatten(-2)[..., :head_dim].contiguous()


def _pack(q: torch.Tensor) -> torch.Tensor:
    """[..., n] numbers below 16 → [..., ceil(n / 2)] bytes."""
    even = F.pad(q, (0, q.shape[-1] % 2)).contiguous()
    low, high = even.view(*even.shape[:-1], even.shape[-1] // 2, 2).unbind(-1)
    return low | (high << 4)


def _unpack(values: torch.Tensor) -> torch.Tensor:
    return torch.stack([values & 15, values >> 4], dim=-1).flatten(-2)
