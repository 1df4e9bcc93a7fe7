"""The map of blocks: what it shows of a large pool and of an empty one, and whose blocks are pointed at."""

import pytest

from pagedd.bench.frames import FakeEngine
from pagedd.client.questions import BlockDetail
from pagedd.tui.screens.request import Request
from pagedd.tui.widgets.block_map import BlockMap
from pagedd.tui.widgets.request_list import RequestList

from .conftest import NOW_S, FakeSource, make_app, make_source, screen_text, settled


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
