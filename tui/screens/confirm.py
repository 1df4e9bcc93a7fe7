"""A question before something is done to somebody, with who that is: yes or no, or a number to settle on."""

from collections.abc import Iterable, Sequence
from typing import ClassVar, cast

from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widget import Widget

from pagedd.tui.line import Line, Span, cut, fit, printable
from pagedd.tui.screens.closing import close
from pagedd.tui.widgets.painted import Look
from pagedd.tui.widgets.pane import Pane


class Confirm(ModalScreen[bool | int | None]):
    """Answers True, or the number, or None for "leave it".

    Args:
        about: to whom or to what, a line each; what is too long is cut.
        deed: what `y` does, in a word or two.
        value: when given, the question is about a number that begins there.
        step: what + and - change it by, within ±`limit`; `first` such steps are made at once.
    """

    DEFAULT_CSS = """
    Confirm { align: center middle; background: $background 60%; }
    Confirm:ansi { background: transparent; }
    Confirm.ascii > Vertical { border: ascii $border; }
    Confirm > Vertical {
        width: 76; max-width: 96%; height: auto; border: round $border; padding: 0 1; background: $background;
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y,enter", "accept", show=False),
        Binding("n,escape,q", "leave", show=False),
        Binding("plus,up", "change(1)", show=False),
        Binding("minus,down", "change(-1)", show=False),
    ]

    def __init__(
        self,
        question: str,
        about: Sequence[Line],
        deed: str,
        *,
        value: int | None = None,
        step: int = 1,
        limit: int = 0,
        first: int = 0,
    ) -> None:
        super().__init__()
        self._question = printable(question)
        self._about = about
        self._deed = deed
        self._before = value
        self._value = value
        self._step = step
        self._limit = limit
        self._first = first

    def compose(self) -> Iterable[Widget]:
        with Vertical():
            pane = Pane(id="question")
            # Question, what it is about, the number or a gap, the keys.
            pane.styles.height = len(self._about) + 3
            yield pane

    def on_mount(self) -> None:
        self.set_class(not cast(Look, self.app).glyphs.is_unicode, "ascii")
        self.action_change(self._first)

    def on_resize(self) -> None:
        self.call_after_refresh(self._draw)

    def action_accept(self) -> None:
        close(self, True if self._value is None else self._value)

    def action_leave(self) -> None:
        close(self)

    def action_change(self, steps: int) -> None:
        if self._value is not None:
            self._value = max(-self._limit, min(self._limit, self._value + steps * self._step))
        self._draw()

    def _draw(self) -> None:
        pane = self.query_one("#question", Pane)
        width, glyphs = pane.size.width, cast(Look, self.app).glyphs
        lines: list[Line] = [[(fit(self._question, width, glyphs.ellipsis), "strong")]]
        lines += [cut(line, width) for line in self._about]
        keys: list[Span] = [("y", "key"), (f" {self._deed}   ", "dim"), ("n", "key"), (" leave it", "dim")]
        if self._value is not None:
            lines.append([(f"{self._before} {glyphs.arrow} ", "dim"), (f"{self._value}", "accent")])
            keys = [("+ -", "key"), (" change   ", "dim"), *keys]
        else:
            lines.append([])
        pane.show([*lines, cut(keys, width)])
