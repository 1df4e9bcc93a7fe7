"""The whole pool, block by block, and who holds it."""

from collections.abc import Iterable
from typing import ClassVar

from textual.containers import Horizontal, Vertical
from textual.widget import Widget

from pagedd.tui.line import Line, cut, fit, printable
from pagedd.tui.renderables import numbers
from pagedd.tui.renderables.cache import cache_bar, cache_figures
from pagedd.tui.renderables.footer import Hint
from pagedd.tui.renderables.requests import STATE_ROLES, mark, short_name
from pagedd.tui.screens.acting import ACTING_HINTS, ActingView
from pagedd.tui.screens.view import HELP, NAVIGATION, QUIT
from pagedd.tui.state import Sequence
from pagedd.tui.widgets.block_map import BlockMap
from pagedd.tui.widgets.block_words import BlockWords
from pagedd.tui.widgets.list_pane import ListPane
from pagedd.tui.widgets.pane import Pane

_WITH_HOLDERS = 110


class Blocks(ActingView):
    HINTS: ClassVar[list[Hint]] = [*NAVIGATION, Hint("z", "zoom", "z"), *ACTING_HINTS[:1], HELP, QUIT]
    DEFAULT_CSS = """
    Blocks #cache { border: round $border-blurred; border-title-color: $foreground; padding: 0 1; width: 1fr; }
    Blocks #cache:focus-within { border: round $border; }
    Blocks.ascii #cache { border: ascii $border-blurred; }
    Blocks.ascii #cache:focus-within { border: ascii $border; }
    Blocks #figures { height: 2; }
    Blocks BlockMap { margin-top: 1; margin-bottom: 1; }
    Blocks BlockWords { height: 2; }
    Blocks #holders { width: 36; }
    Blocks.flat #cache, Blocks.flat #cache:focus-within { border: none; }
    Blocks.flat BlockMap { margin: 0; }
    """
    AUTO_FOCUS = "BlockMap"

    def body(self) -> Iterable[Widget]:
        with Horizontal():
            with Vertical(id="cache"):
                yield Pane(id="figures")
                yield BlockMap()
                yield BlockWords()
            yield ListPane[Sequence](lambda sequence: sequence.key, self._holder_line, id="holders", classes="framed")

    def on_mount(self) -> None:
        self.query_one("#cache", Vertical).border_title = "KV cache"
        self._holders.title("Holders")

    def chosen(self) -> Sequence | None:
        """The request under the cursor of the list, or the one that holds most of the cell under the map's."""
        if self._holders.has_focus:
            return self._holders.current
        block_map = self.query_one(BlockMap)
        blocks = block_map.pointed_blocks
        held = self.state.marks(block_map.pointed) if len(blocks) == 1 else self.state.holders(blocks)
        return held[0][0] if held else None

    def fold(self, width: int, height: int) -> None:
        self.set_class(width < 60 or height < 20, "flat")
        self._holders.display = width >= _WITH_HOLDERS

    def draw(self) -> None:
        state, glyphs = self.state, self.glyphs
        figures = self.query_one("#figures", Pane)
        width = figures.size.width
        lines: list[Line] = [cache_bar(state, width, glyphs), *cache_figures(state, width, glyphs)]
        figures.styles.height = len(lines)
        figures.show(lines)
        holding = [sequence for sequence in state.sequences if sequence.row.num_blocks]
        holding.sort(key=lambda sequence: -sequence.row.num_blocks)
        self._holders.show_items(holding)
        self._draw_map()

    def on_block_map_pointed(self) -> None:
        self._draw_map()

    def on_block_map_opened(self) -> None:
        self.watching.action_open_request()

    def on_list_pane_moved(self) -> None:
        self._draw_map()

    def on_list_pane_opened(self) -> None:
        self.watching.action_open_request()

    @property
    def _holders(self) -> ListPane[Sequence]:
        return self.query_one("#holders", ListPane)

    def _draw_map(self) -> None:
        chosen = self.chosen()
        lit = self.state.pool.tables.get(chosen.key, []) if chosen is not None else []
        block_map = self.query_one(BlockMap)
        block_map.show(self.state.pool, lit)
        self.query_one(BlockWords).show_block(self.session, block_map)
        per_cell = block_map.grid.per_cell
        title = "KV cache" if per_cell == 1 else f"KV cache, {numbers.count(per_cell, 0)} blocks a cell"
        cache = self.query_one("#cache", Vertical)
        if cache.border_title != title:
            cache.border_title = title

    def _holder_line(self, sequence: Sequence, width: int) -> Line:
        row = sequence.row
        return cut(
            [
                mark(sequence, self.glyphs),
                (f" {fit(short_name(sequence), 8)} ", ""),
                (f"{fit(printable(row.user), 6, self.glyphs.ellipsis)} ", "dim"),
                (fit(printable(row.state), 9, self.glyphs.ellipsis), STATE_ROLES.get(row.state, "")),
                (numbers.count(row.num_blocks, 5), ""),
            ],
            width,
        )
