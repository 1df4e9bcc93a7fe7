"""Something with all its words, in a box over a screen that has room for its beginning only."""

from collections.abc import Callable, Iterable
from typing import ClassVar, cast

from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widget import Widget

from pagedd.tui.line import Line
from pagedd.tui.screens.closing import close
from pagedd.tui.widgets.painted import Look
from pagedd.tui.widgets.pane import Pane


class Whole(ModalScreen[None]):
    """Any of the usual keys closes it.

    Args:
        lines: what to show in so many cells.
    """

    DEFAULT_CSS = """
    Whole { align: center middle; background: $background 60%; }
    Whole:ansi { background: transparent; }
    Whole.ascii > Vertical { border: ascii $border; }
    Whole > Vertical {
        width: 90; max-width: 96%; height: auto; max-height: 90%;
        border: round $border; padding: 0 1; background: $background;
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,enter,q,space", "close", show=False)]

    def __init__(self, lines: Callable[[int], list[Line]]) -> None:
        super().__init__()
        self._lines = lines

    def compose(self) -> Iterable[Widget]:
        with Vertical():
            yield Pane(id="whole")

    def on_mount(self) -> None:
        self.set_class(not cast(Look, self.app).glyphs.is_unicode, "ascii")

    def on_resize(self) -> None:
        self.call_after_refresh(self._draw)

    def on_click(self) -> None:
        close(self)

    def action_close(self) -> None:
        close(self)

    def _draw(self) -> None:
        pane = self.query_one("#whole", Pane)
        lines = [*self._lines(pane.size.width), [], [("esc", "key"), (" back", "dim")]]
        pane.styles.height = len(lines)
        pane.show(lines)
