"""Repeated beginnings are counted in chunks of 64, by who may share them."""

from pagedd.daemon.prefix_repeats import MAX_BEGINNINGS, MAX_SCOPES, PrefixRepeats


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


def test_the_newest_scopes_of_a_beginning_are_known_however_many_there_were() -> None:
    repeats = PrefixRepeats()
    for number in range(MAX_SCOPES + 1):
        repeats.saw([7] * 64, number)
    apart = repeats.counts.num_apart_tokens
    for _ in range(3):
        repeats.saw([7] * 64, MAX_SCOPES)
    assert (repeats.counts.num_repeated_tokens, repeats.counts.num_apart_tokens) == (192, apart)


def test_the_scope_that_is_forgotten_is_the_one_unheard_of_for_longest() -> None:
    repeats = PrefixRepeats()
    for scope in (*range(MAX_SCOPES), 0, "newcomer", 0):
        repeats.saw([7] * 64, scope)
    assert repeats.counts.num_repeated_tokens == 128
    repeats.saw([7] * 64, 1)
    assert repeats.counts.num_repeated_tokens == 128
