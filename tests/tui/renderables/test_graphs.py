"""Graphs: a given bound, the newest value at the right, gaps where nothing is known."""

from pagedd.tui.glyphs import ASCII, UNICODE
from pagedd.tui.renderables.graphs import graph


def test_two_values_share_a_cell_and_fill_it_from_below() -> None:
    assert graph([1, 2, 3, 4], 4, 2, 1, UNICODE) == ["⣠⣾"]


def test_few_values_stand_at_the_right_edge() -> None:
    assert graph([4], 4, 3, 1, UNICODE) == ["⠀⠀⢸"]


def test_more_values_than_columns_show_the_newest() -> None:
    assert graph([4, 4, 4, 4, 0, 0], 4, 1, 1, UNICODE) == ["⠀"]


def test_two_lines_have_twice_the_steps() -> None:
    assert graph([8, 4], 8, 1, 2, UNICODE) == ["⡇", "⣿"]


def test_something_is_at_least_a_dot_and_too_much_stays_inside() -> None:
    assert graph([0.001, 100], 4, 1, 1, UNICODE) == ["⣸"]


def test_unknown_and_nothing_are_empty() -> None:
    assert graph([None, 0], 4, 1, 1, UNICODE) == ["⠀"]
    assert graph([1, 1], 0, 1, 1, UNICODE) == ["⠀"]


def test_ascii_has_a_character_a_value() -> None:
    assert graph([None, 1, 4, 7], 7, 4, 1, ASCII) == [" .=#"]
