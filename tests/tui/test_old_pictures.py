"""A picture that is old, held or missing says so, and nothing is shown that there is no more."""

from pagedd.bench.frames import FakeEngine
from pagedd.tui.state import Link
from pagedd.tui.widgets.block_map import BlockMap
from pagedd.tui.widgets.request_list import RequestList

from .conftest import NOW_S, FakeSource, make_app, make_source, screen_text, settled


async def test_a_lost_daemon_is_said_and_everything_is_grey() -> None:
    source = make_source()
    app = make_app(source)
    async with app.run_test(size=(120, 38), notifications=True) as pilot:
        await settled(pilot)
        source.say(Link("lost", "no daemon listens there", 0.5))
        await settled(pilot)
        text = screen_text(app)
        assert "disconnected, retrying" in text
        assert "decode" in text, "the last picture stays"
        assert app.palette.style("ok") == app.palette.grey
        source.say(FakeEngine().frame())
        await settled(pilot)
        assert "● live" in screen_text(app)
        assert app.palette.style("ok") != app.palette.grey


async def test_old_data_say_how_old_they_are() -> None:
    now_s = NOW_S
    app = make_app(make_source(), clock=lambda: now_s)
    async with app.run_test(size=(120, 38), notifications=True) as pilot:
        await settled(pilot)
        now_s += 3.24
        app.screen.show_age()  # type: ignore[attr-defined]
        await settled(pilot)
        assert "3.2 s old" in screen_text(app)


async def test_without_a_daemon_it_says_where_it_looked_and_how_to_start_one() -> None:
    source = FakeSource([Link("lost", "/run/pagedd/stats.sock: no daemon listens there", 0.5)])
    app = make_app(source)
    for size in ((160, 48), (80, 24), (40, 12)):
        async with make_app(source).run_test(size=size) as pilot:
            await settled(pilot)
            text = screen_text(pilot.app)  # type: ignore[arg-type]
            for words in ("No daemon to watch", "/run/pagedd/stats.sock", "make run", "pagetop --demo"):
                assert words in text or (size == (40, 12) and words == "pagetop --demo")
    async with app.run_test(size=(120, 38)) as pilot:
        await settled(pilot)
        source.say(FakeEngine().frame())
        await settled(pilot)
        assert "No daemon to watch" not in screen_text(app)
        assert isinstance(app.focused, RequestList)


async def test_a_picture_that_grew_old_is_grey_and_says_how_old_it_is() -> None:
    now_s = NOW_S
    app = make_app(make_source(), clock=lambda: now_s)
    async with app.run_test(size=(40, 12), notifications=True) as pilot:
        await settled(pilot)
        now_s += 4.2
        app._tick()
        await settled(pilot)
        assert app.palette.style("ok") != app.palette.grey, "a busy machine is given a little time"
        now_s += 8.3
        app._tick()
        await settled(pilot)
        assert app.palette.style("ok") == app.palette.grey
        text = screen_text(app)
        assert "live" not in text
        assert "12.5 s old" in text
        assert "no picture for 12.5 s" in text


async def test_what_a_daemon_that_starts_again_does_not_have_is_not_shown() -> None:
    source = make_source()
    app = make_app(source)
    async with app.run_test(size=(120, 38), notifications=True) as pilot:
        await settled(pilot)
        source.say(Link("lost", "the daemon closed the connection", 0.5))
        loading = FakeEngine().frame()
        loading.blocks, loading.requests, loading.events, loading.figures = None, [], [], {}
        loading.state, loading.detail, loading.uptime_s = "loading", "43 %", 1.0
        source.say(loading)
        await settled(pilot)
        text = screen_text(app)
        assert "loading (43 %)" in text
        assert "decode" not in text
        assert "Requests (0 running, 0 waiting)" in text
        assert app.screen.query_one(BlockMap).grid.num_blocks == 0


async def test_pausing_holds_the_picture_and_says_so() -> None:
    source = make_source()
    app = make_app(source)
    async with app.run_test(size=(120, 38), notifications=True) as pilot:
        await settled(pilot)
        await pilot.press("p")
        frame = FakeEngine().frame()
        frame.model = "another"
        source.say(frame)
        await settled(pilot)
        assert "paused" in screen_text(app)
        assert "another" not in screen_text(app)


async def test_of_an_engine_that_sleeps_no_prefix_is_shown() -> None:
    source, engine = make_source(), FakeEngine()
    app = make_app(source)
    async with app.run_test(size=(160, 48)) as pilot:
        await settled(pilot)
        await pilot.press("4")
        await settled(pilot)
        assert "blocks hold indexed prefixes" in screen_text(app)
        asleep = engine.frame()
        asleep.state, asleep.blocks, asleep.requests = "asleep", None, []
        source.say(asleep)
        await settled(pilot)
        assert "asleep: nothing is cached" in screen_text(app)
        assert "indexed prefixes" not in screen_text(app)
