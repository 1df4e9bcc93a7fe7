"""Which letter a sequence's number leads to."""

from pagedd.client.letters import LETTERS, letter_index

LAST = len(LETTERS) - 1


def test_each_number_has_its_letter_and_the_alphabet_begins_again_behind_its_end() -> None:
    assert [letter_index(number, ()) for number in range(LAST + 2)] == [*range(LAST + 1), 0]


def test_a_taken_letter_leaves_the_next_free_one_and_every_letter_is_given() -> None:
    assert letter_index(3, {3, 4}) == 5
    assert letter_index(LAST, {LAST}) == 0
    for only in range(LAST + 1):
        assert letter_index(7, set(range(LAST + 1)) - {only}) == only


def test_there_is_none_when_all_are_taken() -> None:
    assert letter_index(0, range(LAST + 1)) is None
