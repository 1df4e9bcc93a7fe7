"""One request from close by: its block table, what it has been through, and its text as it comes."""

from collections.abc import Iterable
from textwrap import wrap as wrap_words
from typing import ClassVar

from rich.cells import cell_len, chop_cells
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.widget import Widget

from pagedd.client.errors import PageddError
from pagedd.client.questions import RequestText
from pagedd.tui.line import Line, printable
from pagedd.tui.pool import Key
from pagedd.tui.renderables.detail import (
    figure_lines,
    outcome,
    table_entries,
    table_legend,
    table_lines,
    timeline_lines,
)
from pagedd.tui.renderables.footer import Hint
from pagedd.tui.renderables.requests import first_words, name
from pagedd.tui.screens.acting import ACTING_HINTS, ActingView
from pagedd.tui.screens.closing import close
from pagedd.tui.screens.polling import Polling
from pagedd.tui.screens.view import HELP
from pagedd.tui.state import Sequence, State
from pagedd.tui.widgets.list_pane import ListPane
from pagedd.tui.widgets.pane import Pane

ASK_INTERVAL_S = 0.5
_SIDE_BY_SIDE = 90


class Request(ActingView):
    """Stays when the request has ended, with how it did and what was known of it last; nothing acts on it then."""

    HINTS: ClassVar[list[Hint]] = [*ACTING_HINTS[1:], HELP, Hint("esc", "back", "escape")]
    HINTS_ENDED: ClassVar[list[Hint]] = [HELP, Hint("esc", "back", "escape")]
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "close", show=False)]
    DEFAULT_CSS = """
    Request #figures { height: 5; }
    Request #timeline { height: 4; }
    Request #text { width: 1fr; }
    Request #table { width: 1fr; }
    Request.narrow #halves { layout: vertical; }
    Request.short #timeline { display: none; }
    """
    AUTO_FOCUS = "#table"

    def __init__(self, sequence: Sequence, state: State) -> None:
        """`sequence` is a live one of `state`."""
        super().__init__()
        self._key: Key = sequence.key
        self._last = sequence
        self._entries = table_entries(sequence, state.pool)
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

    def on_unmount(self) -> None:
        self._polling.stop()

    def chosen(self) -> Sequence | None:
        return self.state.sequence(self._key)

    def action_close(self) -> None:
        close(self)

    def hints(self) -> list[Hint]:
        return self.HINTS if self.chosen() is not None else self.HINTS_ENDED

    def fold(self, width: int, height: int) -> None:
        self.set_class(width < _SIDE_BY_SIDE, "narrow")
        self.set_class(height < 20, "short")

    def draw(self) -> None:
        state, glyphs = self.state, self.glyphs
        live = self.chosen()
        if live is not None:
            self._last, self._entries = live, table_entries(live, state.pool)
            self._polling.tick(self.session)
        sequence = self._last
        end = None if live is not None else outcome(state.endings.get(self._key[0]))
        figures, timeline = self.query_one("#figures", Pane), self.query_one("#timeline", Pane)
        about = name(sequence) if end is None else f"{name(sequence)}, {end[0]}"
        # The text below goes on, and its beginning out of sight.
        figures.title(f"Request {about}  {first_words(sequence, glyphs)}".rstrip())
        lines = figure_lines(sequence, state.pool.block_size, figures.size.width, glyphs, end)
        figures.styles.height = len(lines) + 2
        figures.show(lines)
        band = timeline_lines(sequence, timeline.size.width, glyphs)
        timeline.styles.height = len(band) + 2
        timeline.show(band)
        table = self.query_one("#table", ListPane)
        held = "" if end is None else ", as it was; all given back"
        table.title(f"Block table, {len(self._entries)} blocks{held}")
        rows = table_lines(self._entries, table.size.width, glyphs)
        table.show_items(list(enumerate(rows)), [table_legend(glyphs, table.size.width)])
        self._draw_text()

    def _draw_text(self) -> None:
        pane = self.query_one("#text", Pane)
        width, height = pane.size
        is_live = self.chosen() is not None
        pane.title("Text" if is_live else "Text, as it was read last")
        lines: list[Line] = []
        if self._text is not None:
            for text in wrapped(self._text.prompt, width):
                lines.append([(text, "dim")])
            for index, output in enumerate(self._text.outputs):
                if len(self._text.outputs) > 1:
                    lines.append([(f"choice {index}", "accent")])
                lines += [[(text, "")] for text in wrapped(output, width)]
        elif not is_live and not self._error:
            lines = [[("its text went with it", "dim")]]
        else:
            words = wrapped(self._error or "asking the daemon", width)
            lines = [[(text, "warn" if self._error else "dim")] for text in words]
        # The newest text is what is looked for.
        pane.show(lines[-height:] if height else [])

    async def _take(self) -> None:
        try:
            self._text, self._error = await self.session.text(self._key[0]), ""
        except PageddError as error:
            # Of one that has just ended it is no fault that it is not found.
            if self.chosen() is not None:
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
        # What breaks at words counts characters, as far as each is a cell.
        lines += (wrap_words(clean, width) if cell_len(clean) == len(clean) else chop_cells(clean, width)) or [""]
    return lines
