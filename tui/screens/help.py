"""Keys, glyphs and numbers explained."""

from collections.abc import Iterable
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.widget import Widget

from pagedd.tui.line import Line, cut
from pagedd.tui.renderables.footer import Hint
from pagedd.tui.renderables.help_text import help_lines
from pagedd.tui.screens.closing import close
from pagedd.tui.screens.view import View
from pagedd.tui.widgets.list_pane import ListPane


class Help(View):
    HINTS: ClassVar[list[Hint]] = [Hint("esc", "back", "escape"), Hint("j k", "move", "j")]
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,question_mark,q", "close", show=False),
        Binding("k", "up", show=False),
    ]
    AUTO_FOCUS = "ListPane"

    def body(self) -> Iterable[Widget]:
        yield ListPane[tuple[int, Line]](lambda row: row[0], self._line, classes="framed")

    def on_mount(self) -> None:
        self._list.title("Help")

    def needs_frame(self) -> bool:
        return False

    def draw(self) -> None:
        self._list.show_items(list(enumerate(help_lines(self._list.size.width, self.glyphs))))

    def action_close(self) -> None:
        close(self)

    def action_up(self) -> None:
        self._list.action_move(-1)

    @property
    def _list(self) -> ListPane[tuple[int, Line]]:
        return self.query_one(ListPane)

    def _line(self, row: tuple[int, Line], width: int) -> Line:
        return cut(row[1], width)
