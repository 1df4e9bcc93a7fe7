"""All requests, to sort, to filter, and to act on."""

from collections.abc import Iterable
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.widget import Widget
from textual.widgets import Input

from pagedd.tui.renderables.footer import Hint
from pagedd.tui.screens.acting import ACTING_HINTS, ActingView
from pagedd.tui.screens.view import HELP, NAVIGATION, QUIT
from pagedd.tui.state import Sequence
from pagedd.tui.widgets.filter import Filter
from pagedd.tui.widgets.request_list import RequestList


class Requests(ActingView):
    HINTS: ClassVar[list[Hint]] = [
        *NAVIGATION,
        *ACTING_HINTS,
        Hint("s", "sort", "s"),
        Hint("/", "filter", "slash"),
        HELP,
        QUIT,
    ]
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "filter", "Filter", show=False),
        Binding("escape", "unfilter", show=False),
    ]
    AUTO_FOCUS = "RequestList"

    def body(self) -> Iterable[Widget]:
        yield RequestList()

    def foot(self) -> Iterable[Widget]:
        yield Filter()

    def chosen(self) -> Sequence | None:
        return self.query_one(RequestList).current

    def draw(self) -> None:
        self.query_one(RequestList).show_state(self.state)

    def action_filter(self) -> None:
        self.query_one(Filter).begin()

    def action_unfilter(self) -> None:
        self.query_one(Filter).action_drop()

    def on_input_changed(self, message: Input.Changed) -> None:
        self.query_one(RequestList).words = message.value
        self.show()

    def on_filter_closed(self) -> None:
        self.query_one(RequestList).focus()

    def on_list_pane_opened(self) -> None:
        self.watching.action_open_request()
