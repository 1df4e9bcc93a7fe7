"""Words above the keys: as many lines as the screen can spare."""

import pytest

from pagedd.tui.glyphs import UNICODE
from pagedd.tui.line import text_of
from pagedd.tui.renderables.notice import Notice, age_notice, notice_lines
from pagedd.tui.state import Link, State

from ..conftest import played

WHY = "/run/user/1000/pagedd/stats.sock: no daemon listens there; start one with `make run` or name its folder"


def lost() -> State:
    state = played(3)
    state.lose(Link("lost", WHY, 0.5))
    return state


@pytest.mark.parametrize(("height", "num_lines"), [(12, 1), (29, 1), (30, 2), (48, 2)])
def test_a_lost_daemon_takes_one_line_of_a_low_screen_and_says_all_on_a_high_one(height: int, num_lines: int) -> None:
    lines = [text_of(line) for line in notice_lines(age_notice(lost(), 3.0), 100, height, UNICODE)]
    assert len(lines) == num_lines
    assert lines[0].startswith(" ⚠ disconnected, retrying: all above is 3.0 s old. /run/user/1000/pagedd/stats.sock")
    assert lines[-1].rstrip().endswith("…" if num_lines == 1 else "name its folder")
    assert all(len(line) <= 100 for line in lines)


def test_what_goes_away_by_itself_may_take_three_lines_of_any_screen() -> None:
    lines = [text_of(line) for line in notice_lines(Notice("word " * 99), 60, 12, UNICODE)]
    assert len(lines) == 3
    assert lines[-1].rstrip().endswith("…")
