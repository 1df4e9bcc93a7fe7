"""A list with a cursor: rows have keys, so the cursor stays on its row wherever a new frame puts it.

Only the rows in sight are made into lines.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message

from pagedd.tui.line import Line
from pagedd.tui.widgets.painted import Segments
from pagedd.tui.widgets.pane import Pane

Item = TypeVar("Item")


class ListPane(Pane, Generic[Item], can_focus=True):
    """Shows items, each by its line; `head` lines above them do not move.

    Args:
        key: what tells an item from the others, frame after frame.
        line: an item as a line of so many cells.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,ctrl+p", "move(-1)", "Up", show=False),
        Binding("down,j,ctrl+n", "move(1)", "Down", show=False),
        Binding("pageup,ctrl+b,ctrl+u", "page(-1)", "Page up", show=False),
        Binding("pagedown,ctrl+f,ctrl+d", "page(1)", "Page down", show=False),
        Binding("home,g", "jump(False)", "First", show=False),
        Binding("end,G", "jump(True)", "Last", show=False),
        Binding("enter", "open", "Open", show=False),
    ]

    class Moved(Message):
        """The cursor is on another row."""

    class Opened(Message):
        """Enter or a second click on the row under the cursor."""

    class HeadClicked(Message):
        """A click at cell `x` of the head's last line."""

        def __init__(self, x: int) -> None:
            super().__init__()
            self.x = x

    def __init__(
        self,
        key: Callable[[Item], Hashable],
        line: Callable[[Item, int], Line],
        *,
        id: str | None = None,
        classes: str | None = None,
    ) -> None:
        super().__init__(id=id, classes=classes)
        self._key = key
        self._line = line
        self._head: list[Line] = []
        self._items: Sequence[Item] = []
        self._at = 0
        self._top = 0
        self._drawn_cursor_y = 0

    @property
    def current(self) -> Item | None:
        """The item under the cursor."""
        return self._items[self._at] if self._items else None

    def show_items(self, items: Sequence[Item], head: Sequence[Line] = ()) -> None:
        before = self.current
        keys = [self._key(item) for item in items]
        if before is not None and self._key(before) in keys:
            self._at = keys.index(self._key(before))
        self._items, self._head = items, list(head)
        self._draw()
        after = self.current
        if (before is None) != (after is None) or (
            before is not None and after is not None and self._key(before) != self._key(after)
        ):
            self.post_message(self.Moved())

    def select(self, key: Any) -> None:
        """Moves the cursor to the item with that key, if there is one."""
        for at, item in enumerate(self._items):
            if self._key(item) == key:
                self._move_to(at)

    def on_resize(self) -> None:
        self._draw()

    def on_focus(self) -> None:
        self.repaint()

    def on_blur(self) -> None:
        self.repaint()

    def on_click(self, event: events.Click) -> None:
        offset = event.get_content_offset(self)
        if offset is None:
            return
        if offset.y < len(self._head):
            self.post_message(self.HeadClicked(offset.x))
            return
        at = self._top + offset.y - len(self._head)
        if at < len(self._items):
            was_there = at == self._at
            self._move_to(at)
            if was_there and event.chain > 1:
                self.post_message(self.Opened())

    def on_mouse_scroll_down(self) -> None:
        self.action_move(3)

    def on_mouse_scroll_up(self) -> None:
        self.action_move(-3)

    def action_move(self, rows: int) -> None:
        self._move_to(self._at + rows)

    def action_page(self, pages: int) -> None:
        self._move_to(self._at + pages * max(1, self._height - 1))

    def action_jump(self, to_end: bool) -> None:
        self._move_to(len(self._items) - 1 if to_end else 0)

    def action_open(self) -> None:
        if self._items:
            self.post_message(self.Opened())

    @property
    def _height(self) -> int:
        """Rows of items in sight."""
        return max(0, self.size.height - len(self._head))

    @property
    def _cursor_y(self) -> int:
        return len(self._head) + self._at - self._top

    def _move_to(self, at: int) -> None:
        at = max(0, min(len(self._items) - 1, at))
        if at == self._at or not self._items:
            return
        self._at = at
        self._draw()
        self.post_message(self.Moved())

    def _draw(self) -> None:
        before_y = self._drawn_cursor_y
        self._at = max(0, min(len(self._items) - 1, self._at))
        self._top = max(0, min(self._top, len(self._items) - self._height))
        self._top = min(self._top, self._at)
        self._top = max(self._top, self._at - self._height + 1) if self._height else self._at
        width = self.size.width
        items = self._items[self._top : self._top + self._height]
        self.show([*self._head, *(self._line(item, width) for item in items)])
        self._drawn_cursor_y = self._cursor_y
        if before_y != self._cursor_y:
            self.forget_lines((before_y, self._cursor_y))

    def _paint(self, y: int) -> Segments:
        segments = super()._paint(y)
        if not self._is_cursor(y):
            return segments
        over = self.look.palette.selected
        return [Segment(text, (style or Style()) + over) for text, style, _ in segments]

    def _rest_style(self, y: int) -> Style:
        ground = super()._rest_style(y)
        return ground + self.look.palette.selected if self._is_cursor(y) else ground

    def _is_cursor(self, y: int) -> bool:
        return y == self._cursor_y and bool(self._items) and self.has_focus
