"""A letter stays with its sequence, and rests before another gets it."""

from pagedd.client.letters import LETTERS
from pagedd.tui.letters import MAX_MARKS, Marks


def letters(marks: Marks, keys: list[str]) -> list[str | None]:
    found = [marks.get(key) for key in keys]
    return [None if mark is None else mark.letter for mark in found]


def test_a_letter_is_given_with_the_first_block_and_kept() -> None:
    marks = Marks()
    marks.follow(["x", "y"], {"y": None})
    assert letters(marks, ["x", "y"]) == [None, "a"]
    marks.follow(["x", "y"], {"x": None, "y": None})
    assert letters(marks, ["x", "y"]) == ["b", "a"]
    marks.follow(["x", "y"], {})
    assert letters(marks, ["x", "y"]) == ["b", "a"], "also while it has lost its blocks to another"


def test_a_letter_that_came_back_is_the_last_to_be_given_again() -> None:
    marks = Marks()
    marks.follow(["x"], {"x": None})
    marks.follow(["y"], {"y": None})
    assert letters(marks, ["y"]) == ["b"]


def test_s_is_for_shared_blocks_alone_and_beyond_the_alphabet_there_are_numbers() -> None:
    marks = Marks()
    keys = [str(number) for number in range(300)]
    marks.follow(keys, dict.fromkeys(keys))
    given = letters(marks, keys)
    assert "S" not in given
    assert given[60] == "9"
    assert given[61] is None
    numbers = [mark.number for key in keys if (mark := marks.get(key)) is not None]
    assert len(numbers) == 300
    assert max(numbers) == MAX_MARKS


def test_neighbours_differ_in_hue() -> None:
    marks = Marks()
    marks.follow("abcd", dict.fromkeys("abcd"))
    assert len({mark.hue for key in "abcd" if (mark := marks.get(key)) is not None}) == 4


def test_viewers_that_began_at_different_times_give_the_same_letters() -> None:
    since_long, new = Marks(), Marks()
    since_long.follow(["x", "y"], {"x": 0, "y": 1})
    for marks in (since_long, new):
        marks.follow(["y", "z"], {"y": 1, "z": 2})
        assert letters(marks, ["y", "z"]) == ["b", "c"]


def test_a_letter_that_an_older_sequence_still_has_leaves_the_next_one() -> None:
    marks = Marks()
    marks.follow(["old", "new"], {"old": 1, "new": 1 + len(LETTERS)})
    assert letters(marks, ["old", "new"]) == ["b", "c"]
