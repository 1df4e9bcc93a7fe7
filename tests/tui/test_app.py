"""The application without a terminal: keys do what the help says, and no size or terminal breaks it."""

import asyncio
import os
from pathlib import Path

import pytest
from textual.events import Key
from textual.pilot import Pilot

from pagedd.bench.frames import FakeEngine
from pagedd.client.errors import PageddError
from pagedd.client.questions import BlockDetail
from pagedd.client.stats_frame import Ending, Event
from pagedd.tui.glyphs import ASCII, UNICODE, Glyphs
from pagedd.tui.recording import read
from pagedd.tui.screens.help import Help
from pagedd.tui.screens.request import Request, wrapped
from pagedd.tui.state import Link
from pagedd.tui.themes import GROUNDS, ROLES, choose_theme, make_palettes
from pagedd.tui.widgets.block_map import BlockMap
from pagedd.tui.widgets.request_list import RequestList

from .conftest import NOW_S, FakeSource, FrozenReplay, full_disk, make_app, screen_text, settled

SCREENS = {"1": "Requests (", "2": "Holders", "3": "Requests (", "4": "Cached prefixes", "5": "Events: all kinds"}


def make_source(num_frames: int = 40, **settings: object) -> FakeSource:
    engine = FakeEngine(**settings)  # type: ignore[arg-type]
    return FakeSource([engine.frame() for _ in range(num_frames)])


@pytest.mark.parametrize("key", SCREENS)
async def test_a_number_goes_to_its_screen(key: str) -> None:
    app = make_app(make_source())
    async with app.run_test(size=(160, 48)) as pilot:
        await settled(pilot)
        await pilot.press(key)
        await settled(pilot)
        assert SCREENS[key] in screen_text(app)


@pytest.mark.parametrize("size", [(300, 100), (160, 48), (80, 24), (70, 24), (40, 12)])
@pytest.mark.parametrize("key", [*SCREENS, "enter", "question_mark"])
async def test_every_screen_folds_to_every_size(size: tuple[int, int], key: str) -> None:
    app = make_app(FrozenReplay())
    async with app.run_test(size=size) as pilot:
        await settled(pilot)
        await pilot.press(key)
        await settled(pilot)
        text = screen_text(app)
        assert "pagetop" in text
        assert all(len(line) <= size[0] for line in text.splitlines())


@pytest.mark.parametrize(
    ("size", "words"),
    [
        ((80, 11), "too small: 80x11, needs 40x12"),
        ((39, 24), "too small: 39x24, needs 40x12"),
        ((20, 5), "too small: 20x5, ne…"),
        ((1, 1), "…"),
    ],
)
async def test_a_terminal_that_is_too_small_is_told_so(size: tuple[int, int], words: str) -> None:
    app = make_app(make_source())
    async with app.run_test(size=size) as pilot:
        await settled(pilot)
        assert screen_text(app).strip() == words


async def test_fifty_sizes_while_frames_arrive() -> None:
    engine = FakeEngine(num_blocks=5000, num_requests=30)
    source = FakeSource([engine.frame()])
    app = make_app(source)
    async with app.run_test(size=(160, 48)) as pilot:
        await settled(pilot)
        for number in range(50):
            source.say(engine.frame())
            await pilot.resize_terminal(1 + number * 37 % 200, 1 + number * 11 % 70)
            if number % 10 == 0:
                await pilot.press(str(1 + number // 10))
        await pilot.resize_terminal(120, 38)
        await settled(pilot)
        assert "pagetop" in screen_text(app)


@pytest.mark.parametrize("theme", ["dark", "light", "contrast", "16", "none"])
@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
async def test_every_theme_shows_every_state_as_a_glyph(theme: str, glyphs: Glyphs) -> None:
    app = make_app(FrozenReplay(), theme=theme, glyphs=glyphs)
    async with app.run_test(size=(120, 38), notifications=True) as pilot:
        await settled(pilot)
        text = screen_text(app)
        for state in ("S", glyphs.cached[1], "decode"):
            assert state in text
        if glyphs is ASCII:
            assert text.isascii()


def test_every_palette_knows_every_role() -> None:
    for palette in make_palettes().values():
        assert set(ROLES) | set(GROUNDS) <= set(palette.styles)
        assert set(palette.greyed.styles) == set(palette.styles)


def test_no_colour_means_no_colour() -> None:
    palette = make_palettes()["none"]
    styles = [*palette.styles.values(), palette.selected, palette.cursor, palette.taken, palette.evicted, palette.grey]
    assert all(style.color is None and style.bgcolor is None for style in styles)


def test_sixteen_colours_are_the_terminals_own() -> None:
    for style in make_palettes()["16"].styles.values():
        assert style.color is None or style.color.number is None or style.color.number < 16
        assert style.bgcolor is None


@pytest.mark.parametrize(
    ("environ", "theme"),
    [
        ({"TERM": "xterm-256color"}, "dark"),
        ({"TERM": "xterm", "COLORTERM": "truecolor"}, "dark"),
        ({"TERM": "linux"}, "16"),
        ({"TERM": "xterm-256color", "COLORFGBG": "0;15"}, "light"),
        ({"TERM": "xterm-256color", "COLORFGBG": "15;0"}, "dark"),
        ({"TERM": "xterm-256color", "NO_COLOR": "1"}, "none"),
        ({"TERM": "xterm-256color", "NO_COLOR": ""}, "dark"),
    ],
)
def test_the_theme_follows_the_terminal(environ: dict[str, str], theme: str) -> None:
    assert choose_theme(environ) == theme


async def test_no_color_leaves_no_colour_on_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    app = make_app(make_source(), theme=choose_theme(os.environ))
    async with app.run_test(size=(120, 38), notifications=True) as pilot:
        await settled(pilot)
        styles = {segment.style for strip in app.screen._compositor.render_strips() for segment in strip}
        coloured = [style for style in styles if style is not None and style.color is not None]
        assert all(style.color is None or style.color.is_default for style in coloured)


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


async def test_a_tick_while_the_screen_is_taken_down_does_no_harm() -> None:
    app = make_app(make_source())
    async with app.run_test(size=(120, 38)) as pilot:
        await settled(pilot)
        await app.screen.remove_children()
        app._tick()


@pytest.mark.parametrize(("interval_s", "again_s"), [(0.25, 1.0), (2.0, 8.0)])
async def test_a_daemon_with_few_pictures_is_seldom_asked_about_the_block_under_the_cursor(
    interval_s: float, again_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagedd.tui.widgets.block_words._REST_S", 0.0)
    now_s = NOW_S
    # All in sight from the beginning: a map of another size asks anew.
    engine = FakeEngine(num_blocks=256)
    source = FakeSource([])
    asked_s: list[float] = []
    answer = source.block

    async def block(index: int) -> BlockDetail:
        asked_s.append(now_s - NOW_S)
        return await answer(index)

    monkeypatch.setattr(source, "block", block)
    async with make_app(source, clock=lambda: now_s).run_test(size=(120, 38)) as pilot:
        for second in range(10):
            now_s = NOW_S + second
            frame = engine.frame()
            frame.interval_s = interval_s
            source.say(frame)
            await settled(pilot)
    assert sorted(set(asked_s))[:2] == [0.0, again_s]


async def test_moving_onto_a_request_lights_its_blocks() -> None:
    app = make_app(make_source())
    async with app.run_test(size=(160, 48)) as pilot:
        await settled(pilot)
        for _ in range(3):
            await pilot.press("down")
            await settled(pilot)
            chosen = app.screen.query_one(RequestList).current
            assert chosen is not None
            assert app.screen.query_one(BlockMap)._lit == frozenset(chosen.row.block_table)


async def test_the_map_follows_cursor_mouse_and_zoom() -> None:
    app = make_app(make_source(num_blocks=20_000, prompt_tokens=(8_000, 9_000), chunk_tokens=2_000))
    async with app.run_test(size=(120, 38), notifications=True) as pilot:
        await settled(pilot)
        await pilot.press("2")
        await settled(pilot)
        block_map = app.screen.query_one(BlockMap)
        per_cell = block_map.grid.per_cell
        assert per_cell > 1
        await pilot.press("l", "l", "j")
        await settled(pilot)
        start = 2 * per_cell + block_map.grid.blocks_per_row
        assert block_map.pointed == start
        text = screen_text(app)
        assert f"blocks {start:04}–{start + per_cell - 1:04} · " in text, "all blocks of the cell, not one of them"
        assert f"block {start:04}" not in text
        await pilot.press("enter")
        await settled(pilot)
        assert isinstance(app.screen, Request), "of whoever has most of it"
        await pilot.press("escape")
        await settled(pilot)
        await pilot.press("z")
        await settled(pilot)
        assert block_map.grid.per_cell == 1
        await pilot.press("G")
        await settled(pilot)
        assert block_map.pointed == 19_999
        assert "block 19999" in screen_text(app)
        await pilot.hover(BlockMap, offset=(block_map.grid.label_width + 2, 0))
        await settled(pilot)
        assert block_map.pointed == block_map.grid.cells(block_map._top)[1]


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


async def test_what_came_of_an_action_covers_no_row_and_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedd.tui.pagetop._NOTICE_S", 0.3)
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
        await pilot.pause(0.4)
        await settled(pilot)
        assert screen_text(app).splitlines() == before


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


async def test_enter_opens_all_of_an_event() -> None:
    engine = FakeEngine()
    frame = engine.frame()
    reason = "prompt_too_long (prompt): 9210 tokens with 100 of output, limit 8192; raise max_model_len or shorten it"
    frame.events = [Event(seq=1, time_s=1000.0, kind="refusal", reason=reason, request_id="7f31c0ffee123456")]
    app = make_app(FakeSource([frame]))
    for size in ((80, 24), (40, 12)):
        async with make_app(FakeSource([frame])).run_test(size=size) as pilot:
            app = pilot.app  # type: ignore[assignment]
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


async def test_an_empty_pool_leaves_the_room_to_the_requests() -> None:
    frame = FakeEngine(num_blocks=20_000, num_requests=2, prompt_tokens=(64, 90)).frame()
    app = make_app(FakeSource([frame]))
    async with app.run_test(size=(120, 38)) as pilot:
        await settled(pilot)
        block_map = app.screen.query_one(BlockMap)
        assert block_map.grid.per_cell == 1, "what is in use is seen block by block"
        assert block_map.size.height == 4
        assert "19 744 more blocks, all free" in screen_text(app)
        assert app.screen.query_one(RequestList).size.height > 15
        await pilot.press("2")
        await settled(pilot)
        await pilot.press("z", "G")
        await settled(pilot)
        assert "block 19999" in screen_text(app), "zoomed in, every block has its cell"


async def test_a_map_of_runs_takes_no_row_that_it_leaves_empty() -> None:
    app = make_app(make_source())
    async with app.run_test(size=(100, 30)) as pilot:
        await settled(pilot)
        block_map = app.screen.query_one(BlockMap)
        assert block_map.grid.per_cell == 2
        assert block_map.size.height == block_map.grid.num_rows


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


async def test_a_session_is_recorded_and_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    engine = FakeEngine()
    source = FakeSource([engine.frame()])
    app = make_app(source)
    async with app.run_test(size=(120, 38), notifications=True) as pilot:
        await settled(pilot)
        await pilot.press("r")
        await settled(pilot)
        assert "recording" in screen_text(app)
        source.say(engine.frame())
        await pilot.press("enter")
        await settled(pilot)
        await pilot.press("escape", "r")
        await settled(pilot)
    (file,) = list(tmp_path.iterdir())  # noqa: ASYNC240 (the application has ended)
    kinds = [type(record.message).__name__ for record in read(file)]
    assert kinds.count("StatsFrame") == 2
    assert "RequestText" in kinds


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


async def press_at_once(pilot: "Pilot[None]", *keys: str) -> None:
    """As a terminal sends them: all are there before the first is heeded."""
    for key in keys:
        pilot.app.post_message(Key(key, key if len(key) == 1 else None))
    await settled(pilot)


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


async def test_a_recording_that_is_damaged_says_where_it_ends_and_stays() -> None:
    source = make_source()
    app = make_app(source)
    async with app.run_test(size=(160, 48)) as pilot:
        await settled(pilot)
        source.say(Link("ended", "a.pagetop: the file is damaged"))
        await settled(pilot)
        assert "nothing after this can be shown. a.pagetop: the file is damaged" in screen_text(app)
        assert "Requests (" in screen_text(app)


async def test_a_recording_that_a_full_disk_ends_is_said(tmp_path: Path) -> None:
    source = make_source()
    app = make_app(source)
    async with app.run_test(size=(160, 48)) as pilot:
        await settled(pilot)
        app.session.start_recording(tmp_path / "a.pagetop")
        with full_disk(100):
            await pilot.press("r")
            await settled(pilot)
        assert "the recording has ended (File too large)" in screen_text(app)
        assert "recording  " not in screen_text(app).splitlines()[0]
