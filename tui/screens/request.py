"""One request from close by: its block table, what it has been through, and its text as it comes."""

from collections.abc import Iterable
from textwrap import wrap as wrap_words
from typing import ClassVar

from rich.cells import chop_cells
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.widget import Widget

from pagedd.client.errors import PageddError
from pagedd.client.protocol import RequestText
from pagedd.tui.line import Line, fit, printable
from pagedd.tui.pool import Key
from pagedd.tui.renderables.detail import figure_lines, table_legend, table_lines, timeline_lines
from pagedd.tui.renderables.footer import Hint
from pagedd.tui.renderables.requests import name
from pagedd.tui.screens.acting import ACTING_HINTS, ActingView
from pagedd.tui.screens.polling import Polling
from pagedd.tui.screens.view import HELP
from pagedd.tui.state import Sequence
from pagedd.tui.widgets.list_pane import ListPane
from pagedd.tui.widgets.pane import Pane

ASK_INTERVAL_S = 0.5
_SIDE_BY_SIDE = 90


class Request(ActingView):
    """Stays when the request has ended, with the last that was known of it."""

    HINTS: ClassVar[list[Hint]] = [Hint("esc", "back", "escape"), *ACTING_HINTS[1:], HELP]
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "app.pop_screen", show=False)]
    DEFAULT_CSS = """
    Request #figures { height: 5; }
    Request #timeline { height: 4; }
    Request #text { width: 1fr; }
    Request #table { width: 1fr; }
    Request.narrow #halves { layout: vertical; }
    Request.short #timeline { display: none; }
    """
    AUTO_FOCUS = "#table"

    def __init__(self, sequence: Sequence) -> None:
        super().__init__()
        self._key: Key = sequence.key
        self._last = sequence
        self._has_ended = False
        self._text: RequestText | None = None
        self._error = ""
        self._polling = Polling(ASK_INTERVAL_S, self._take)

    def body(self) -> Iterable[Widget]:
        yield Pane(id="figures", classes="framed")
        yield Pane(id="timeline", classes="framed")
        with Horizontal(id="halves"):
            yield ListPane[tuple[int, Line]](
                lambda row: row[0], lambda row, width: row[1], id="table", classes="framed"
            )
            yield Pane(id="text", classes="framed")

    def on_mount(self) -> None:
        self.query_one("#timeline", Pane).title("Timeline")
        self.query_one("#text", Pane).title("Text")

    def on_unmount(self) -> None:
        self._polling.stop()

    def chosen(self) -> Sequence | None:
        return self.state.sequence(self._key)

    def fold(self, width: int, height: int) -> None:
        self.set_class(width < _SIDE_BY_SIDE, "narrow")
        self.set_class(height < 20, "short")

    def draw(self) -> None:
        state, glyphs = self.state, self.glyphs
        live = state.sequence(self._key)
        self._has_ended = live is None
        sequence = self._last = live or self._last
        if not self._has_ended:
            self._polling.tick(self.session)
        figures, timeline = self.query_one("#figures", Pane), self.query_one("#timeline", Pane)
        ended = ", ended" if self._has_ended else ""
        figures.title(f"Request {name(sequence)}{ended}")
        lines = figure_lines(sequence, state.pool.block_size, figures.size.width, glyphs)
        figures.styles.height = len(lines) + 2
        figures.show(lines)
        band = timeline_lines(sequence, timeline.size.width, glyphs)
        timeline.styles.height = len(band) + 2
        timeline.show(band)
        table = self.query_one("#table", ListPane)
        table.title(f"Block table, {len(sequence.row.block_table)} blocks")
        rows = table_lines(sequence, state, table.size.width, glyphs)
        table.show_items(list(enumerate(rows)), [table_legend(glyphs, table.size.width)])
        self._draw_text()

    def _draw_text(self) -> None:
        pane = self.query_one("#text", Pane)
        width, height = pane.size
        lines: list[Line] = []
        if self._text is None:
            lines = [[(fit(self._error or "asking the daemon", width), "warn" if self._error else "dim")]]
        else:
            for text in wrapped(self._text.prompt, width):
                lines.append([(text, "dim")])
            for index, output in enumerate(self._text.outputs):
                if len(self._text.outputs) > 1:
                    lines.append([(f"choice {index}", "accent")])
                lines += [[(text, "")] for text in wrapped(output, width)]
        # The newest text is what is looked for.
        pane.show(lines[-height:] if height else [])

    async def _take(self) -> None:
        try:
            self._text, self._error = await self.session.text(self._key[0]), ""
        except PageddError as error:
            self._error = error.message
        if self.is_current:
            self._draw_text()


def wrapped(text: str, width: int) -> list[str]:
    """`text` in lines at most `width` cells wide, broken at words where it has some."""
    if width < 1:
        return []
    lines: list[str] = []
    for paragraph in text.splitlines():
        clean = printable(paragraph)
        lines += (wrap_words(clean, width) if clean.isascii() else chop_cells(clean, width)) or [""]
    return lines
