"""The line to type a filter into, above the keys; it is there only while there is a filter."""

from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import Input


class Filter(Input):
    """Enter keeps the words and goes back to the list, escape drops them."""

    DEFAULT_CSS = """
    Filter { dock: bottom; height: 1; border: none; padding: 0 1; display: none; margin-bottom: 1; }
    Filter:focus { border: none; }
    Filter.shown { display: block; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "drop", show=False)]

    class Closed(Message):
        """The list has the keys again."""

    def __init__(self) -> None:
        super().__init__(placeholder="words that must occur; enter keeps them, esc drops them", compact=True)

    def begin(self) -> None:
        self.add_class("shown")
        self.focus()

    def action_drop(self) -> None:
        self.value = ""
        self.remove_class("shown")
        self.post_message(self.Closed())

    def on_input_submitted(self) -> None:
        if not self.value:
            self.remove_class("shown")
        self.post_message(self.Closed())
