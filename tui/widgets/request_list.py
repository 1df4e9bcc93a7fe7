"""The requests as a list with a cursor, in the order and with the filter that were chosen."""

from typing import ClassVar

from textual.binding import Binding, BindingType

from pagedd.tui.line import Line
from pagedd.tui.renderables.requests import SORTS, arranged, header_line, models_differ, request_line, sort_of
from pagedd.tui.state import Sequence, State
from pagedd.tui.widgets.list_pane import ListPane


class RequestList(ListPane[Sequence]):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "sort", "Sort", show=False),
        Binding("S", "turn", "Turn order", show=False),
    ]

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(lambda sequence: sequence.key, self._request, id=id, classes="framed")
        self.words = ""
        self._sort = "age"
        self._is_reversed = False
        self._has_models = False
        self._state: State | None = None

    def show_state(self, state: State) -> None:
        self._state = state
        rows = arranged(state.sequences, self.words, self._sort, self._is_reversed)
        if (has_models := models_differ(state.sequences)) != self._has_models:
            self._has_models = has_models
            self.repaint()
        head = header_line(self.size.width, self._sort, self._is_reversed, self.look.glyphs, has_models)
        states = [sequence.row.state for sequence in state.sequences]
        num_running = states.count("decode") + states.count("prefill")
        self.title(f"Requests ({num_running} running, {len(states) - num_running} waiting)")
        filtered = f"{len(rows)} with “{self.words}”" if self.words else ""
        self.subtitle(filtered if self.look.glyphs.is_unicode else filtered.replace("“", '"').replace("”", '"'))
        self.show_items(rows, [head])

    def action_sort(self) -> None:
        self.sort_by(SORTS[(SORTS.index(self._sort) + 1) % len(SORTS)])

    def action_turn(self) -> None:
        self.sort_by(self._sort)

    def sort_by(self, name: str) -> None:
        """Sorts by a column; a second time turns the order around."""
        self._is_reversed = name == self._sort and not self._is_reversed
        self._sort = name
        if self._state is not None:
            self.show_state(self._state)

    def on_list_pane_head_clicked(self, message: ListPane.HeadClicked) -> None:
        message.stop()
        name = sort_of(message.x, self.size.width, self._has_models)
        if name is not None:
            self.sort_by(name)

    def _request(self, sequence: Sequence, width: int) -> Line:
        return request_line(sequence, width, self.look.glyphs, self._has_models)
