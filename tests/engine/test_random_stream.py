"""The uniform stream: known values, range, and independence of everything but its three arguments."""

import numpy as np

from pagedd.engine.random_stream import splitmix64, uniforms


def test_splitmix64_gives_the_published_numbers():
    # Seed 1234567: the first five outputs printed by Vigna's splitmix64.c.
    outputs = splitmix64(np.full(5, 1234567, dtype=np.uint64), np.arange(5, dtype=np.uint64))
    assert outputs.tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_each_number_depends_on_its_own_arguments_alone():
    alone = uniforms([42], [1], [7])
    among_others = uniforms([1, 42, 3], [0, 1, 9], [5, 7, 7])
    assert among_others[1] == alone[0]


def test_seed_choice_and_position_each_change_the_number():
    numbers = uniforms([42, 43, 42, 42], [0, 0, 1, 0], [0, 0, 0, 1])
    assert len(set(numbers.tolist())) == 4


def test_seeds_wrap_at_64_bits_and_may_be_negative():
    assert uniforms([-1], [0], [0])[0] == uniforms([2**64 - 1], [0], [0])[0]


def test_numbers_fill_the_unit_interval_evenly():
    count = 10_000
    numbers = uniforms([5] * count, [0] * count, list(range(count)))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    tenths, _ = np.histogram(numbers, bins=10, range=(0, 1))
    chi_square = ((tenths - count / 10) ** 2 / (count / 10)).sum()
    assert chi_square < 27.9  # 0.1 % point of 9 degrees of freedom; the seed is fixed, so this cannot flicker
