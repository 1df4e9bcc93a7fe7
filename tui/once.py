"""`pagetop --once`: the overview as plain text, for a pipe, a log or a terminal that cannot be drawn on."""

from pagedd.tui.glyphs import Glyphs
from pagedd.tui.line import Line, cut, text_of
from pagedd.tui.renderables import numbers
from pagedd.tui.renderables.batch import batch_row
from pagedd.tui.renderables.block_cells import Grid, block_cells, blocks_in_sight, run_cell
from pagedd.tui.renderables.cache import cache_bar, cache_figures
from pagedd.tui.renderables.header import Modes
from pagedd.tui.renderables.header import header_line as page_header
from pagedd.tui.renderables.machine import machine_row
from pagedd.tui.renderables.requests import arranged, header_line, models_differ, request_line
from pagedd.tui.renderables.throughput import throughput_row
from pagedd.tui.state import State

MAX_MAP_ROWS = 16


def once_lines(state: State, modes: Modes, width: int, glyphs: Glyphs) -> list[str]:
    """The newest frame in lines at most `width` wide."""
    lines: list[Line] = [
        page_header(state, modes, state.received_s, width, glyphs),
        machine_row(state, width, glyphs),
        throughput_row(state, width, glyphs),
        batch_row(state, width, glyphs),
        [],
        cache_bar(state, width, glyphs),
        *cache_figures(state, width, glyphs),
    ]
    rows = arranged(state.sequences, "", "age", False)
    lines += [*([(text, "")] for text in map_lines(state, width, MAX_MAP_ROWS, glyphs)), []]
    has_models = models_differ(rows)
    lines.append(header_line(width, "age", False, glyphs, has_models))
    lines += [request_line(row, width, glyphs, has_models) for row in rows]
    return [text_of(cut(line, width)).rstrip() for line in lines]


def map_lines(state: State, width: int, height: int, glyphs: Glyphs) -> list[str]:
    pool = state.pool
    if not pool.num_blocks:
        return []
    grid = Grid.fit(blocks_in_sight(pool.num_blocks, pool.extent), width, height)
    cells = block_cells(glyphs)
    lines = []
    for row in range(grid.num_rows):
        blocks = grid.cells(row)
        if grid.per_cell == 1:
            texts = [cells[pool.looks[block]].glyph for block in blocks]
        else:
            runs = (pool.looks[block : block + grid.per_cell] for block in blocks)
            texts = [run_cell(run, glyphs.is_unicode).glyph for run in runs]
        groups = " ".join("".join(texts[at : at + 8]) for at in range(0, len(texts), 8))
        lines.append(f"{blocks.start:0{grid.label_width}} {groups}")
    if num_more := pool.num_blocks - grid.num_blocks:
        lines.append(f"{' ' * grid.label_width} {numbers.count(num_more, 0)} more blocks, all free")
    return lines
