"""The way through the screens: each key does what the help says."""

from pathlib import Path

import pytest

from pagedd.bench.frames import FakeEngine
from pagedd.client.stats_frame import Event
from pagedd.tui.screens.help import Help
from pagedd.tui.widgets.request_list import RequestList

from .conftest import FakeSource, FrozenReplay, make_app, make_source, press_at_once, screen_text, settled

# What is at the top of each, below the header.
SCREENS = {"1": "GPU", "2": "KV cache", "3": "Requests (", "4": "indexed prefixes", "5": "Events: all kinds"}


@pytest.mark.parametrize("key", SCREENS)
async def test_a_number_goes_to_its_screen(key: str) -> None:
    app = make_app(make_source())
    async with app.run_test(size=(160, 48)) as pilot:
        await settled(pilot)
        await pilot.press("5" if key == "1" else "1")
        await settled(pilot)
        await pilot.press(key)
        await settled(pilot)
        assert SCREENS[key] in screen_text(app).splitlines()[1]


async def test_a_tick_while_the_screen_is_taken_down_does_no_harm() -> None:
    app = make_app(make_source())
    async with app.run_test(size=(120, 38)) as pilot:
        await settled(pilot)
        await app.screen.remove_children()
        app._tick()


async def test_enter_opens_all_of_an_event() -> None:
    frame = FakeEngine().frame()
    reason = "prompt_too_long (prompt): 9210 tokens with 100 of output, limit 8192; raise max_model_len or shorten it"
    frame.events = [Event(seq=1, time_s=1000.0, kind="refusal", reason=reason, request_id="7f31c0ffee123456")]
    for size in ((80, 24), (40, 12)):
        async with make_app(FakeSource([frame])).run_test(size=size) as pilot:
            app = pilot.app
            await settled(pilot)
            await pilot.press("5")
            await settled(pilot)
            assert "shorten it" not in screen_text(app)
            await pilot.press("enter")
            await settled(pilot)
            text = " ".join(screen_text(app).replace("│", " ").split())
            for words in reason.split():
                assert words in text
            assert "7f31c0ffee123456" in text
            await pilot.press("escape")
            await settled(pilot)
            assert "Events: all kinds" in screen_text(app)


async def test_a_filter_is_typed_kept_and_dropped() -> None:
    app = make_app(make_source())
    async with app.run_test(size=(160, 48)) as pilot:
        await settled(pilot)
        await pilot.press("slash")
        await settled(pilot)
        await pilot.press(*"noor", "enter")
        await settled(pilot)
        rows = app.screen.query_one(RequestList)._items
        assert {sequence.row.user for sequence in rows} == {"noor"}
        assert "with “noor”" in screen_text(app)
        await pilot.press("slash", "escape")
        await settled(pilot)
        assert len(app.screen.query_one(RequestList)._items) == 14


async def test_requests_are_sorted_by_key_and_by_a_click_on_the_column() -> None:
    app = make_app(make_source())
    async with app.run_test(size=(160, 48)) as pilot:
        await settled(pilot)
        await pilot.press("3")
        await settled(pilot)
        await pilot.press("s")
        await settled(pilot)
        assert "id▴" in screen_text(app)
        requests = app.screen.query_one(RequestList)
        x = screen_text(app).splitlines()[2].index("blocks")
        await pilot.click(RequestList, offset=(x - requests.region.x, 1))
        await settled(pilot)
        assert "blocks▾" in screen_text(app)
        await pilot.press("S")
        await settled(pilot)
        assert "blocks▴" in screen_text(app)


async def test_events_are_shown_by_kind() -> None:
    app = make_app(make_source(num_frames=200, num_blocks=300))
    async with app.run_test(size=(120, 38), notifications=True) as pilot:
        await settled(pilot)
        await pilot.press("5")
        await settled(pilot)
        assert "eviction" in screen_text(app)
        await pilot.press("f")
        await settled(pilot)
        text = screen_text(app)
        assert "Events: preemption" in text
        assert "64 cached blocks" not in text


async def test_help_has_each_number_with_its_file() -> None:
    app = make_app(make_source())
    async with app.run_test(size=(120, 100)) as pilot:
        await settled(pilot)
        await pilot.press("question_mark")
        await settled(pilot)
        text = screen_text(app)
        assert isinstance(app.screen, Help)
        for words in ("fragmentation", "engine/stats.py", "underlined: the block has room left", "cancel the request"):
            assert words in text
        await pilot.press("q")
        await settled(pilot)
        assert not isinstance(app.screen, Help)


def test_every_file_that_the_help_names_exists() -> None:
    from pagedd.tui.renderables.help_text import DEFINITIONS

    root = Path(__file__).parents[2]
    assert not [file for _, _, file in DEFINITIONS if not (root / file).is_file()]


async def test_the_next_theme_is_a_key_away_and_the_palette_lists_commands() -> None:
    app = make_app(make_source())
    async with app.run_test(size=(120, 38), notifications=True) as pilot:
        await settled(pilot)
        await pilot.press("t")
        await settled(pilot)
        assert app.theme == "light"
        await pilot.press("colon")
        await settled(pilot)
        await pilot.pause(0.2)
        assert "Cancel request" in screen_text(app)


@pytest.mark.parametrize("keys", [("question_mark", "escape"), ("5", "enter", "escape")], ids=["help", "whole"])
async def test_closing_twice_closes_nothing_below(keys: tuple[str, ...]) -> None:
    app = make_app(FrozenReplay())
    async with app.run_test(size=(160, 48)) as pilot:
        await settled(pilot)
        for key in keys[:-1]:
            await pilot.press(key)
            await settled(pilot)
        depth = len(app.screen_stack)
        await press_at_once(pilot, keys[-1], keys[-1], keys[-1])
        assert app.is_running
        assert len(app.screen_stack) == depth - 1 == 1
