"""Where a block stands on the map, and what a cell says of one block or of many."""

import pytest

from pagedd.tui.glyphs import ASCII, UNICODE
from pagedd.tui.line import text_of
from pagedd.tui.pool import CACHED, FREE, OWNED, SHARED
from pagedd.tui.renderables.block_cells import Cell, Grid, block_cells, blocks_in_sight, run_cell
from pagedd.tui.renderables.block_line import run_line

from ..conftest import played


def test_a_pool_that_fits_has_a_cell_for_each_block() -> None:
    grid = Grid.fit(20, 4 + 2 * 9, 3)
    assert (grid.num_columns, grid.per_cell, grid.num_rows) == (16, 1, 2)
    assert list(grid.cells(1)) == [16, 17, 18, 19]


def test_a_larger_pool_has_as_many_blocks_a_cell_as_it_needs() -> None:
    grid = Grid.fit(100, 4 + 9, 3)
    assert (grid.num_columns, grid.per_cell, grid.num_rows) == (8, 5, 3)
    assert list(grid.cells(2)) == [80, 85, 90, 95]


def test_labels_of_a_large_pool_are_wider() -> None:
    assert Grid.fit(100_000, 160, 40).label_width == 5


@pytest.mark.parametrize(
    ("x", "y", "block"),
    [
        (4, 0, None),
        (5, 0, 0),
        (12, 0, 7),
        (13, 0, None),
        (14, 0, 8),
        (5, 1, 16),
        (8, 1, 19),
        (9, 1, None),
        (30, 0, None),
    ],
)
def test_coordinates_lead_to_a_block_and_gaps_to_none(x: int, y: int, block: int | None) -> None:
    assert Grid.fit(20, 22, 3).block_at(x, y) == block


@pytest.mark.parametrize("num_blocks", [0, 1, 7, 4096, 100_000])
@pytest.mark.parametrize("size", [(1, 1), (12, 1), (70, 3), (300, 80)])
def test_every_block_has_a_cell_on_any_screen(num_blocks: int, size: tuple[int, int]) -> None:
    grid = Grid.fit(num_blocks, *size)
    firsts = [first for row in range(grid.num_rows) for first in grid.cells(row)]
    assert firsts == list(range(0, num_blocks, grid.per_cell))
    assert grid.num_rows <= size[1]


def test_each_state_has_a_glyph_of_its_own() -> None:
    cells = block_cells(UNICODE)
    glyphs = [cells[look].glyph for look in (FREE, CACHED, CACHED + 3, SHARED, OWNED + 1, OWNED + 2, OWNED + 100)]
    assert glyphs == ["·", "▒", "░", "S", "a", "b", "■"]
    assert [block_cells(ASCII)[look].glyph for look in (FREE, CACHED, SHARED, OWNED + 1)] == [".", ":", "S", "a"]


@pytest.mark.parametrize(
    ("looks", "cell"),
    [
        ([FREE] * 4, Cell("·", "free")),
        ([CACHED, CACHED + 2, CACHED + 2, FREE], Cell("░", "cached2")),
        ([OWNED + 1] * 4, Cell("█", "own1", "ground.free")),
        ([OWNED + 1, FREE, FREE, FREE], Cell("▂", "own1", "ground.free")),
        ([OWNED + 1, CACHED, CACHED, FREE], Cell("▂", "own1", "ground.cached")),
        ([OWNED + 1, OWNED + 2, OWNED + 2, FREE], Cell("▆", "own2", "ground.free")),
    ],
)
def test_a_run_shows_how_much_is_used_and_by_whom(looks: list[int], cell: Cell) -> None:
    assert run_cell(bytes(looks), True) == cell


def test_a_run_in_ascii_is_a_letter_once_half_of_it_is_used() -> None:
    assert run_cell(bytes([OWNED + 1, OWNED + 1, FREE, FREE]), False).glyph == "a"
    assert run_cell(bytes([OWNED + 1, FREE, FREE, FREE]), False).glyph == ":"


@pytest.mark.parametrize(
    ("num_blocks", "extent", "in_sight"),
    [(100, 0, 100), (600, 0, 256), (511, 0, 511), (10_000, 256, 256), (10_000, 257, 512), (10_000, 5001, 10_000)],
)
def test_what_of_a_pool_was_never_in_use_has_no_cells(num_blocks: int, extent: int, in_sight: int) -> None:
    assert blocks_in_sight(num_blocks, extent) == in_sight


def test_a_run_in_words_says_how_many_are_what_and_whose() -> None:
    state = played(40)
    looks = state.pool.looks[:200]
    line = text_of(run_line(state, range(200), 200, UNICODE))
    assert line.startswith("▸ blocks 0000–0199 · ")
    num_free = looks.count(FREE)
    num_cached = sum(looks.count(CACHED + age) for age in range(4))
    assert f"{200 - num_free - num_cached} used: " in line
    assert f"{looks.count(SHARED)} shared · {num_cached} cached · {num_free} free" in line
    sequence, held = state.holders(range(200))[0]
    assert sequence.mark is not None
    assert f": {sequence.mark.letter} {held}, " in line
