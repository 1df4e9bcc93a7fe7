"""The first and the last lines of every screen: what is shown and how old it is; what is new, and what the keys do."""

from textual import events

from pagedd.tui.renderables.footer import Hint, footer_line, hint_at, spelled
from pagedd.tui.renderables.header import Modes, header_line
from pagedd.tui.renderables.notice import Notice, notice_lines
from pagedd.tui.state import State
from pagedd.tui.widgets.pane import Pane


class Header(Pane):
    DEFAULT_CSS = "Header { dock: top; height: 1; }"

    def show_state(self, state: State, modes: Modes, now_s: float) -> None:
        self.show([header_line(state, modes, now_s, self.size.width, self.look.glyphs)])


class KeyBar(Pane):
    """The keys, and above them a notice while there is one: rows of the body make room for it, and none is covered.

    A click on a hint is as good as its key.
    """

    DEFAULT_CSS = "KeyBar { dock: bottom; height: 1; }"

    def __init__(self, hints: list[Hint]) -> None:
        super().__init__()
        self._hints = hints
        self._notice: Notice | None = None
        self._height = 1
        self._drawn_for: tuple[object, ...] = ()

    def show_hints(self, hints: list[Hint], notice: Notice | None) -> bool:
        """Whether the rest of the screen has another height now."""
        self._hints, self._notice = hints, notice
        # Nearly every picture has those of the last one.
        is_same = self._drawn_for == (hints, notice, self.size.width, self.app.size.height)
        return False if is_same else self._draw()

    def on_resize(self) -> None:
        self._draw()

    def on_click(self, event: events.Click) -> None:
        hint = hint_at(spelled(self._hints, self.look.glyphs), self.size.width, event.x)
        if hint is not None and event.y == self._height - 1:
            self.app.simulate_key(hint.press)

    def _draw(self) -> bool:
        width, height, glyphs = self.size.width, self.app.size.height, self.look.glyphs
        self._drawn_for = self._hints, self._notice, width, height
        lines = [] if self._notice is None else notice_lines(self._notice, width, height, glyphs)
        is_other = self._height != len(lines) + 1
        if is_other:
            self.styles.height = self._height = len(lines) + 1
        self.show([*lines, footer_line(spelled(self._hints, glyphs), width)])
        return is_other
