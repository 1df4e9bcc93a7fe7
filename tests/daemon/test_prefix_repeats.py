"""Repeated beginnings are counted in chunks of 64, by who may share them."""

from pagedd.daemon.prefix_repeats import MAX_BEGINNINGS, PrefixRepeats


def counted(repeats: PrefixRepeats) -> tuple[int, int, int]:
    counts = repeats.counts
    return counts.num_tokens, counts.num_repeated_tokens, counts.num_apart_tokens


def test_only_whole_chunks_from_the_beginning_count() -> None:
    repeats = PrefixRepeats()
    repeats.saw([7] * 200, "ana")
    assert counted(repeats) == (200, 0, 0)
    repeats.saw([7] * 130, "ana")
    assert counted(repeats) == (330, 128, 0)
    repeats.saw([1] + [7] * 199, "ana")
    repeats.saw([7] * 63, "ana")
    assert counted(repeats) == (593, 128, 0)


def test_the_same_chunk_elsewhere_is_another_prefix() -> None:
    repeats = PrefixRepeats()
    repeats.saw([1] * 64 + [2] * 64, "ana")
    repeats.saw([3] * 64 + [2] * 64, "ana")
    assert counted(repeats) == (256, 0, 0)


def test_what_only_others_began_with_counts_apart_until_one_has_said_it_too() -> None:
    repeats = PrefixRepeats()
    repeats.saw([7] * 64, "ana")
    repeats.saw([7] * 64, "bob")
    assert counted(repeats) == (128, 0, 64)
    repeats.saw([7] * 64, "bob")
    assert counted(repeats) == (192, 64, 64)


def test_old_beginnings_are_forgotten() -> None:
    repeats = PrefixRepeats()
    for number in range(MAX_BEGINNINGS + 1):
        repeats.saw([number] * 64, "ana")
    repeats.saw([0] * 64, "ana")
    assert repeats.counts.num_repeated_tokens == 0
    repeats.saw([MAX_BEGINNINGS] * 64, "ana")
    assert repeats.counts.num_repeated_tokens == 64
