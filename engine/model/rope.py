"""Rotary position embedding: inverse frequencies under each scaling, and the cosines and sines of a batch's positions.

The rotation of the heads is a kernel (`rope_and_write_kv` of `kernels/ops.py`); which scaling a model has, `config.py`.
Formulas follow transformers' `modeling_rope_utils`, in float32 and in the same order, so that angles at far positions
are the same to the last bit.
"""

import math

import torch

from pagedd.engine.model.config import RopeConfig


class RotaryEmbedding:
    """Cosines and sines for any position."""

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device) -> None:
        frequencies, self._attention_factor = inverse_frequencies(rope, head_dim)
        self._frequencies = frequencies.to(device)

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[num_tokens] int64 → cosines and sines, [num_tokens, head_dim // 2] float32."""
        angles = positions[:, None].float() * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        return (
            (cos, sin)
            if self._attention_factor == 1.0
            else (cos * self._attention_factor, sin * self._attention_factor)
        )


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """[head_dim // 2] float32 radians per position, and the factor that multiplies cosines and sines."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.frequency_divisors is not None:
        return frequencies / torch.tensor(rope.frequency_divisors), 1.0
    if rope.kind == "linear":
        return frequencies / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(frequencies, rope), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, head_dim), _yarn_attention_factor(rope)
    return frequencies, 1.0


def _llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / frequencies
    low_wavelength = rope.original_max_position / rope.low_freq_factor
    high_wavelength = rope.original_max_position / rope.high_freq_factor
    stretched = torch.where(wavelengths > low_wavelength, frequencies / rope.factor, frequencies)
    blend = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - blend) * stretched / rope.factor + blend * stretched
    is_between = ~(wavelengths < high_wavelength) & ~(wavelengths > low_wavelength)
    return torch.where(is_between, blended, stretched)


def _yarn(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """YaRN (Peng et al. 2023): a ramp between interpolated and original frequencies, by rotations over the context."""

    def dimension(num_rotations: float) -> float:
        ratio = rope.original_max_position / (num_rotations * 2 * math.pi)
        return (head_dim * math.log(ratio)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # the ramp is a step
    positional = rope.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return 1.0 / (rope.factor * positional) * (1 - keep) + 1.0 / positional * keep


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def magnitude(scale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * scale * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)
