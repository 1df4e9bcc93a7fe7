"""The first and the last line of every screen: what is shown and how old it is, and what the keys do."""

from textual import events

from pagedd.tui.renderables.footer import Hint, footer_line, hint_at, spelled
from pagedd.tui.renderables.header import Modes, header_line
from pagedd.tui.state import State
from pagedd.tui.widgets.pane import Pane


class Header(Pane):
    DEFAULT_CSS = "Header { dock: top; height: 1; }"

    def show_state(self, state: State, modes: Modes, now_s: float) -> None:
        self.show([header_line(state, modes, now_s, self.size.width, self.look.glyphs)])


class KeyBar(Pane):
    """A click on a hint is as good as its key."""

    DEFAULT_CSS = "KeyBar { dock: bottom; height: 1; }"

    def __init__(self, hints: list[Hint]) -> None:
        super().__init__()
        self._hints = hints

    def on_resize(self) -> None:
        self.show([footer_line(spelled(self._hints, self.look.glyphs), self.size.width)])

    def on_click(self, event: events.Click) -> None:
        hint = hint_at(spelled(self._hints, self.look.glyphs), self.size.width, event.x)
        if hint is not None:
            self.app.simulate_key(hint.press)
