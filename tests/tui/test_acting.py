"""What is done to requests and prefixes: asked first, done once, and said what came of it."""

import asyncio

import pytest

from pagedd.client.errors import PageddError
from pagedd.tui.widgets.request_list import RequestList

from .conftest import make_app, make_source, press_at_once, screen_text, settled


async def test_cancelling_asks_first_and_says_what_came_of_it() -> None:
    source = make_source()
    app = make_app(source)
    async with app.run_test(size=(120, 38), notifications=True) as pilot:
        await settled(pilot)
        chosen = app.screen.query_one(RequestList).current
        assert chosen is not None
        await pilot.press("k")
        await settled(pilot)
        text, row = screen_text(app), chosen.row
        assert f"Cancel this request of {row.user}?" in text
        for words in (row.preview, row.model, row.request_id, f"{row.num_output_tokens} tokens so far", "cancel it"):
            assert words in text
        await pilot.press("n")
        await settled(pilot)
        assert source.done == []
        await pilot.press("k", "y")
        await settled(pilot)
        assert source.done == [("cancel", chosen.row.request_id)]
        assert "is cancelled" in screen_text(app)


async def test_a_refusal_of_the_daemon_is_shown_with_its_code() -> None:
    source = make_source()
    source.refusal = PageddError("forbidden", "only the service's owner may do that")
    app = make_app(source)
    async with app.run_test(size=(120, 38), notifications=True) as pilot:
        await settled(pilot)
        await pilot.press("k", "enter")
        await settled(pilot)
        text = screen_text(app)
        assert "forbidden" in text
        assert "only the service's owner may do that" in text


async def test_a_priority_is_settled_in_steps_and_then_set() -> None:
    source = make_source()
    app = make_app(source)
    async with app.run_test(size=(120, 38), notifications=True) as pilot:
        await settled(pilot)
        chosen = app.screen.query_one(RequestList).current
        assert chosen is not None
        before = chosen.row.priority
        await pilot.press("plus", "plus", "minus", "plus")
        await settled(pilot)
        assert f"{before} → {before + 20}" in screen_text(app)
        await pilot.press("y")
        await settled(pilot)
        assert source.done == [("set_priority", chosen.row.request_id, before + 20)]
        await pilot.press("minus", "plus", "y")
        await settled(pilot)
        assert len(source.done) == 1, "the priority that it has is no change"


async def test_what_came_of_an_action_covers_no_row_and_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedd.tui.pagetop._NOTICE_S", 1.0)
    source = make_source()
    message = "only root and the daemon's own user may do that; ask them, or become one of them, and then try once more"
    source.refusal = PageddError("forbidden", message)
    app = make_app(source)
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        await settled(pilot)
        before = screen_text(app).splitlines()
        await pilot.press("k", "y")
        await settled(pilot)
        lines = screen_text(app).splitlines()
        assert " ".join("".join(lines[-3:-1]).replace("⚠", "").split()) == f"forbidden: {message}", "all of it"
        assert lines[-1] == before[-1], "the keys stay"
        assert lines[:-4] == before[:-4], "what is above has only lost its last rows"
        await pilot.pause(1.1)
        await settled(pilot)
        assert screen_text(app).splitlines() == before


async def test_a_prefix_folds_and_is_evicted_after_a_question() -> None:
    source = make_source()
    app = make_app(source)
    async with app.run_test(size=(120, 38), notifications=True) as pilot:
        await settled(pilot)
        await pilot.press("4")
        await settled(pilot)
        assert screen_text(app).count("Translate to Danish") == 2
        await pilot.press("enter")
        await settled(pilot)
        assert screen_text(app).count("Translate to Danish") == 1
        await pilot.press("e")
        await settled(pilot)
        text = screen_text(app)
        for words in ("Evict 23 blocks: this prefix and all below it?", "of ana", "what live requests use stays"):
            assert words in text
        await pilot.press("y")
        await settled(pilot)
        assert source.done == [("evict_prefix", "0a3f9c01b2d4e5f6")]
        assert "4 blocks evicted; 1 block in use and kept" in screen_text(app)


async def test_an_impatient_yes_is_one() -> None:
    source = make_source()
    app = make_app(source)
    async with app.run_test(size=(160, 48)) as pilot:
        await settled(pilot)
        await press_at_once(pilot, "k", "k")
        await press_at_once(pilot, "y", "y", "y")
        assert [name for name, *_ in source.done] == ["cancel"]
        assert len(app.screen_stack) == 1


async def test_an_action_that_is_not_answered_yet_is_said() -> None:
    source, is_answered = make_source(), asyncio.Event()

    async def cancel(request_id: str) -> None:
        await is_answered.wait()

    source.cancel = cancel  # type: ignore[method-assign]
    app = make_app(source)
    async with app.run_test(size=(160, 48)) as pilot:
        await settled(pilot)
        await pilot.press("k", "y")
        await pilot.pause(0.7)
        assert "the daemon is asked, and has not answered yet" in screen_text(app)
        is_answered.set()
        await settled(pilot)
        assert "is cancelled" in screen_text(app)
