"""A card, as far as launching depends on it, and what sets architectures apart. Knows no kernel."""

import functools
from dataclasses import dataclass

import torch

# Shared memory that one program may take decides how many tiles can be under way at once.
#     64 KiB   75
#     99 KiB   86, 89, 120 (and 121)
#     163 KiB  80 (and 87)
#     227 KiB  90, 100 (and 103)
WITH_MUCH_SHARED_MEMORY = frozenset({80, 87, 90, 100, 103})

WITHOUT_MATRIX_INSTRUCTIONS = frozenset({75})  # Triton has none for it

WITHOUT_BFLOAT16 = frozenset({75})  # it computes in it, slowly, if it is told to; left to itself it takes float16

# With stacked memory: a processor's share of the bandwidth is three times that of other cards.
WITH_HIGH_BANDWIDTH = frozenset({80, 90, 100, 103})

# Those with wgmma or tcgen05; mma, which all others have, takes what it multiplies from registers.
WITH_PRODUCTS_FROM_SHARED_MEMORY = frozenset({90, 100, 103})


@dataclass(frozen=True, slots=True)
class Card:
    """What launching depends on.

    Attributes:
        arch: compute capability: 90 of sm_90.
        num_processors: streaming multiprocessors.
    """

    arch: int
    num_processors: int


# What the interpreter pretends to be: the oldest of the architectures with bfloat16, with so few processors that small
# tests meet full and empty ones.
INTERPRETED = Card(arch=80, num_processors=8)


@functools.cache
def card_of(device: torch.device) -> Card:
    if device.type != "cuda":
        return INTERPRETED
    properties = torch.cuda.get_device_properties(device)
    return Card(10 * properties.major + properties.minor, properties.multi_processor_count)
