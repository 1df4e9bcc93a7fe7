"""The line of keys: what fits, and what always does."""

from pagedd.tui.renderables.footer import Hint, footer_line, hint_at, placed

HINTS = [
    Hint(key, label, key) for key, label in (("a", "one"), ("b", "two"), ("c", "three"), ("?", "help"), ("q", "quit"))
]


def text(width: int) -> str:
    return "".join(piece for piece, _ in footer_line(HINTS, width))


def test_all_stand_in_their_order_where_there_is_room() -> None:
    assert text(60) == " a one  b two  c three  ? help  q quit"


def test_help_and_the_way_out_stay_where_others_do_not_fit() -> None:
    assert text(32) == " a one  b two  ? help  q quit"
    assert text(18) == " ? help  q quit"


def test_a_line_too_narrow_for_both_has_help() -> None:
    assert [hint.key for _, hint in placed(HINTS, 9)] == ["?"]


def test_a_mouse_is_on_what_stands_there() -> None:
    on = hint_at(HINTS, 18, 9)
    assert on is not None
    assert on.key == "q"


def test_on_a_narrow_screen_what_acts_comes_before_the_names_of_screens() -> None:
    hints = [Hint("1", "overview", "1", ""), Hint("2", "events", "2", "screens"), *HINTS]
    assert "".join(piece for piece, _ in footer_line(hints, 99)).startswith(" 1  2 screens  a one")
    assert "".join(piece for piece, _ in footer_line(hints, 100)).startswith(" 1 overview  2 events  a one")
    assert hint_at(hints, 99, 4) == Hint("2", "screens", "2", "screens")
