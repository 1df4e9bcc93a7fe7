"""What happened, newest first, with the reasons; all of it, one kind, or what has certain words; and one with all."""

from collections.abc import Iterable
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.widget import Widget
from textual.widgets import Input

from pagedd.client.stats_frame import Event
from pagedd.tui.line import Line
from pagedd.tui.renderables.events import KINDS, event_line, event_lines, matching
from pagedd.tui.renderables.footer import Hint
from pagedd.tui.screens.view import HELP, NAVIGATION, QUIT, View
from pagedd.tui.screens.whole import Whole
from pagedd.tui.widgets.filter import Filter
from pagedd.tui.widgets.list_pane import ListPane


class Events(View):
    HINTS: ClassVar[list[Hint]] = [
        *NAVIGATION,
        Hint("⏎", "open", "enter"),
        Hint("f", "kind", "f"),
        Hint("/", "filter", "slash"),
        HELP,
        QUIT,
    ]
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("f", "next_kind", "Kind", show=False),
        Binding("slash", "filter", "Filter", show=False),
        Binding("escape", "unfilter", show=False),
        Binding("k", "up", show=False),
    ]
    AUTO_FOCUS = "ListPane"

    def __init__(self) -> None:
        super().__init__()
        self._kind: str | None = None
        self._words = ""

    def body(self) -> Iterable[Widget]:
        yield ListPane[Event](id, self._line, classes="framed")

    def foot(self) -> Iterable[Widget]:
        yield Filter()

    def draw(self) -> None:
        found = matching(self.state.events, self._kind, self._words)
        title = f"Events: {self._kind or 'all kinds'} ({len(found)})"
        self._list.title(f"{title}, with {self._words!r}" if self._words else title)
        nothing: list[Line] = [[("nothing happened since pagetop looks", "dim")]]
        self._list.show_items(found, [] if found else nothing)

    def needs_frame(self) -> bool:
        return not self.state.events

    def on_list_pane_opened(self) -> None:
        event = self._list.current
        if event is not None:
            self.app.push_screen(Whole(lambda width: event_lines(event, width, self.glyphs)))

    def action_next_kind(self) -> None:
        kinds = [None, *KINDS]
        self._kind = kinds[(kinds.index(self._kind) + 1) % len(kinds)]
        self.show()

    def action_up(self) -> None:
        self._list.action_move(-1)

    def action_filter(self) -> None:
        self.query_one(Filter).begin()

    def action_unfilter(self) -> None:
        self.query_one(Filter).action_drop()

    def on_input_changed(self, message: Input.Changed) -> None:
        self._words = message.value
        self.show()

    def on_filter_closed(self) -> None:
        self._list.focus()

    @property
    def _list(self) -> ListPane[Event]:
        return self.query_one(ListPane)

    def _line(self, event: Event, width: int) -> Line:
        return event_line(event, width, self.glyphs)
