"""Bars show a share of a whole, and the least of something differs from nothing."""

import pytest

from pagedd.tui.glyphs import ASCII, UNICODE
from pagedd.tui.line import text_of
from pagedd.tui.renderables.bars import bar, stacked


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (None, "▕    ▏"),
        (0.0, "▕    ▏"),
        (0.001, "▕▏   ▏"),
        (0.5, "▕██  ▏"),
        (0.55, "▕██▎ ▏"),
        (0.999, "▕███▉▏"),
        (1.0, "▕████▏"),
        (3.0, "▕████▏"),
    ],
)
def test_a_bar_is_exact_to_an_eighth_of_a_cell(ratio: float | None, text: str) -> None:
    assert text_of(bar(ratio, 6, UNICODE)) == text


@pytest.mark.parametrize(("ratio", "text"), [(0.01, "[#   ]"), (0.5, "[##  ]"), (0.99, "[### ]"), (1.0, "[####]")])
def test_a_bar_in_ascii_has_whole_cells(ratio: float, text: str) -> None:
    assert text_of(bar(ratio, 6, ASCII)) == text


def test_a_bar_without_room_is_nothing() -> None:
    assert bar(0.5, 2, UNICODE) == []


def test_parts_of_a_whole_fill_it_and_a_small_part_shows() -> None:
    assert text_of(stacked([(0.5, "█", ""), (0.01, "▓", ""), (0.49, "·", "")], 10)) == "█████▓····"
    assert text_of(stacked([(1.0, "█", ""), (0.0, "▓", ""), (0.0, "·", "")], 10)) == "██████████"
