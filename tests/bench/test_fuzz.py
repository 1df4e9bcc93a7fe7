"""Whatever reads bytes from outside refuses what is wrong, and breaks at nothing. `make fuzz` tries a million more."""

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pagedd.bench.fuzz.target import Target
from pagedd.bench.fuzz.targets import TARGETS

NUM_INPUTS = 1000


def near(target: Target) -> st.SearchStrategy[bytes]:
    """Seeds with some of their bytes taken out, replaced or repeated."""
    pieces = st.binary(max_size=8) | st.sampled_from([b"[" * 2000, b"9" * 5000, b"\xff" * 8, b"\x00" * 8, b"e999"])
    edit = st.tuples(st.integers(0, 1 << 16), st.integers(0, 4), pieces)

    def apply(seed: bytes, edits: list[tuple[int, int, bytes]]) -> bytes:
        for offset, length, piece in edits:
            at = offset % (len(seed) + 1)
            seed = seed[:at] + piece + seed[at + length :]
        return seed

    return st.builds(apply, st.sampled_from(target.seeds), st.lists(edit, min_size=1, max_size=4))


@pytest.mark.parametrize("name", TARGETS)
def test_a_reader_takes_its_seeds_and_whatever_is_near_them(name: str) -> None:
    target = TARGETS[name]

    @settings(
        max_examples=NUM_INPUTS,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(near(target) | st.binary(max_size=64))
    @example(b"")
    def read(data: bytes) -> None:
        target.read(data)

    for seed in target.seeds:
        target.read(seed)
    read()
