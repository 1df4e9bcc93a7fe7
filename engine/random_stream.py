"""Uniform numbers as a pure function of (seed, choice index, position). No state, so nothing to save, fork or restore.

Whatever else is in the batch, and however often a sequence is preempted or the engine restarted, a token's draw is the
same. Knows nothing of logits; `sampler.py` turns a uniform number into a token.

The function is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014;
constants of Vigna's public-domain splitmix64.c). Its output number i is a hash of seed + (i + 1) × gamma, so it can be
had without the i before it. The request's seed yields one stream seed for each choice, and that one's output number
`position` is the draw.
"""

import numpy as np
from numpy.typing import NDArray

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1


def uniforms(seeds: list[int], choice_indices: list[int], positions: list[int]) -> NDArray[np.float64]:
    """One number in [0, 1), a multiple of 2⁻⁵³, for each (seed, choice index, position). Seeds are taken modulo 2⁶⁴."""
    seed = np.array([value & _MASK for value in seeds], dtype=np.uint64)
    stream_seed = splitmix64(seed, np.array(choice_indices, dtype=np.uint64))
    bits = splitmix64(stream_seed, np.array(positions, dtype=np.uint64))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def splitmix64(seed: NDArray[np.uint64], index: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Output number `index` (from 0) of SplitMix64 started at `seed`, elementwise; arithmetic is modulo 2⁶⁴."""
    z: NDArray[np.uint64] = seed + (index + np.uint64(1)) * _GAMMA
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    z ^= z >> np.uint64(31)
    return z
