"""Everything on one screen: the machine on top, the cache in the middle, the requests below."""

from collections.abc import Iterable
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.widget import Widget

from pagedd.tui.line import Line
from pagedd.tui.renderables.advice import advice_words
from pagedd.tui.renderables.batch import batch_lines, batch_row
from pagedd.tui.renderables.cache import cache_bar, cache_figures
from pagedd.tui.renderables.footer import Hint
from pagedd.tui.renderables.machine import machine_lines, machine_row, machine_title
from pagedd.tui.renderables.throughput import throughput_lines, throughput_row, throughput_title
from pagedd.tui.screens.acting import ACTING_HINTS, ActingView
from pagedd.tui.screens.view import HELP, NAVIGATION, QUIT
from pagedd.tui.state import Sequence
from pagedd.tui.widgets.block_map import BlockMap
from pagedd.tui.widgets.block_words import BlockWords
from pagedd.tui.widgets.pane import Pane
from pagedd.tui.widgets.request_list import RequestList

WIDE, TALL, VERY_TALL = 100, 28, 60
_FRAME = 2
_LEAST_REQUESTS = 5


class Overview(ActingView):
    HINTS: ClassVar[list[Hint]] = [
        *NAVIGATION,
        *ACTING_HINTS,
        Hint("/", "filter", "slash"),
        Hint("p", "pause", "p"),
        Hint("r", "record", "r"),
        HELP,
        QUIT,
    ]
    BINDINGS: ClassVar[list[BindingType]] = [Binding("slash", "filter", "Filter", show=False)]
    DEFAULT_CSS = """
    Overview #top { height: 6; }
    Overview #rows { height: 3; padding: 0 1; }
    Overview #cache { border: round $border-blurred; border-title-color: $foreground; padding: 0 1; height: auto; }
    Overview #cache:focus-within { border: round $border; }
    Overview.ascii #cache { border: ascii $border-blurred; }
    Overview.ascii #cache:focus-within { border: ascii $border; }
    Overview #figures { height: 2; }
    Overview.flat #cache, Overview.flat #cache:focus-within { border: none; }
    Overview.flat RequestList { border: none; }
    """
    AUTO_FOCUS = "RequestList"

    def body(self) -> Iterable[Widget]:
        with Horizontal(id="top"):
            yield Pane(id="machine", classes="framed")
            yield Pane(id="throughput", classes="framed")
            yield Pane(id="batch", classes="framed")
        yield Pane(id="rows")
        with Vertical(id="cache"):
            yield Pane(id="figures")
            yield BlockMap()
            yield BlockWords()
        yield RequestList()

    def on_mount(self) -> None:
        self.query_one("#throughput", Pane).title("Throughput")
        self.query_one("#batch", Pane).title("Batch")
        self.query_one("#cache", Vertical).border_title = "KV cache"

    def chosen(self) -> Sequence | None:
        return self.query_one(RequestList).current

    def fold(self, width: int, height: int) -> None:
        is_framed = width >= 60 and height >= 20
        self.set_class(not is_framed, "flat")
        has_panels = width >= WIDE and height >= TALL
        self.query_one("#top").display = has_panels
        self.query_one("#rows").display = not has_panels
        self.query_one("#top").styles.height = 8 if height >= VERY_TALL else 6
        self._share_height()

    def draw(self) -> None:
        state, glyphs = self.state, self.glyphs
        if self.query_one("#top").display:
            machine, throughput = self.query_one("#machine", Pane), self.query_one("#throughput", Pane)
            batch = self.query_one("#batch", Pane)
            machine.title(machine_title(state))
            machine.show(machine_lines(state, machine.size.width, machine.size.height, glyphs))
            throughput.title(throughput_title(throughput.size.width, glyphs))
            throughput.show(throughput_lines(state, throughput.size.width, throughput.size.height, glyphs))
            batch.show(batch_lines(state, batch.size.width, glyphs))
        else:
            rows = self.query_one("#rows", Pane)
            width = rows.size.width
            rows.show([row(state, width, glyphs) for row in (machine_row, throughput_row, batch_row)])
        self._share_height()
        figures = self.query_one("#figures", Pane)
        lines: list[Line] = [cache_bar(state, figures.size.width, glyphs)]
        figures.show([*lines, *cache_figures(state, figures.size.width, glyphs)])
        self._show_advice(advice_words(state))
        requests = self.query_one(RequestList)
        requests.show_state(state)
        self._draw_map()

    def on_list_pane_moved(self) -> None:
        self._draw_map()

    def on_list_pane_opened(self) -> None:
        self.watching.action_open_request()

    def action_filter(self) -> None:
        self.watching.action_show("requests", filtering=True)

    def _draw_map(self) -> None:
        requests = self.query_one(RequestList)
        chosen = requests.current if requests.has_focus else None
        lit = self.state.pool.tables.get(chosen.key, []) if chosen is not None else []
        self.query_one(BlockMap).show(self.state.pool, lit)
        self.query_one(BlockWords).show_block(self.session, self.query_one(BlockMap))

    def _show_advice(self, words: str) -> None:
        """Setting it has Textual draw the whole panel, so only when it is another one."""
        cache = self.query_one("#cache", Vertical)
        if words != (cache.border_subtitle or ""):
            cache.border_subtitle = words

    def _share_height(self) -> None:
        """The map takes the rows that its blocks need, at most what the requests leave it; they have the rest."""
        width, height = self.size
        is_framed = not self.has_class("flat")
        frames = _FRAME if is_framed else 0
        inside = width - (4 if is_framed else 0)
        num_figures = 1 + len(cache_figures(self.state, inside, self.glyphs)) if height >= 16 else 1
        has_words = height >= 20
        top = (8 if height >= VERY_TALL else 6) if self.query_one("#top").display else 3
        rest = height - 2 - top - frames - num_figures - has_words
        for_requests = max(_LEAST_REQUESTS if height >= 16 else 3, rest * 2 // 5)
        map_height = max(1, BlockMap.rows_of(self.state.pool, inside, max(1, rest - for_requests)))
        self.query_one("#figures").styles.height = num_figures
        self.query_one(BlockMap).styles.height = map_height
        self.query_one(BlockWords).display = has_words
