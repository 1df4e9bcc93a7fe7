"""One request: its block table, its timeline and its text, while it runs and once it has ended."""

import pytest

from pagedd.bench.frames import FakeEngine
from pagedd.client.stats_frame import Ending
from pagedd.tui.screens.request import Request, wrapped
from pagedd.tui.widgets.request_list import RequestList

from .conftest import make_app, make_source, screen_text, settled


def test_text_breaks_at_words_as_long_as_each_character_is_a_cell() -> None:
    assert wrapped("the sea’s own salt", 10) == ["the sea’s", "own salt"]
    assert wrapped("海は広いな", 4) == ["海は", "広い", "な"]
    assert wrapped("one\n\ntwo", 10) == ["one", "", "two"]


async def test_enter_opens_the_block_table_with_live_text_and_escape_goes_back() -> None:
    source = make_source()
    app = make_app(source)
    async with app.run_test(size=(120, 38), notifications=True) as pilot:
        await settled(pilot)
        await pilot.press("enter")
        await settled(pilot)
        text = screen_text(app)
        assert isinstance(app.screen, Request)
        for words in ("Block table, ", "0 → 0", "Timeline", "Hello yourself."):
            assert words in text
        assert "cancel" in text.splitlines()[-1]
        assert "priority" in text.splitlines()[-1]
        await pilot.press("escape")
        await settled(pilot)
        assert not isinstance(app.screen, Request)


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        ("length", "ended at its limit"),
        ("stop", "ended by itself"),
        ("abort", "cancelled"),
        ("out_of_memory", "failed: out_of_memory"),
        (None, "ended"),
    ],
)
async def test_a_request_that_ended_while_it_was_open_is_shown_as_it_was_and_cannot_be_acted_on(
    outcome: str | None, words: str
) -> None:
    source = make_source()
    app = make_app(source)
    async with app.run_test(size=(120, 38), notifications=True) as pilot:
        await settled(pilot)
        chosen = app.screen.query_one(RequestList).current
        assert chosen is not None
        request_id, num_blocks = chosen.row.request_id, chosen.row.num_blocks
        await pilot.press("enter")
        await settled(pilot)
        table = [line for line in screen_text(app).splitlines() if " → " in line]
        frame = FakeEngine().frame()
        assert frame.blocks is not None
        # By now its blocks are somebody else's, who has filled them differently.
        frame.blocks.fills, frame.requests = bytes([3]) * len(frame.blocks.states), []
        frame.endings = [Ending(request_id=request_id, outcome=outcome)] if outcome is not None else []
        source.say(frame)
        await settled(pilot)
        text = screen_text(app)
        assert f"Request {request_id}, {words}" in text
        assert f"held blocks {num_blocks}" in text
        assert "decode" not in text.split("Timeline")[0]
        assert [line for line in text.splitlines() if " → " in line] == table
        assert "cancel" not in text.splitlines()[-1]
        assert "priority" not in text.splitlines()[-1]
        await pilot.press("k", "plus")
        await settled(pilot)
        assert isinstance(app.screen, Request), "there is nothing to ask about"
        await pilot.press("escape")
        await settled(pilot)
        assert not isinstance(app.screen, Request)
