"""Acting on a request from any screen that lists them: cancel, change the priority, open. Asks before it acts."""

from typing import ClassVar

from textual.binding import Binding, BindingType

from pagedd.tui.renderables.footer import Hint
from pagedd.tui.renderables.requests import about_lines
from pagedd.tui.screens.confirm import Confirm
from pagedd.tui.screens.view import View
from pagedd.tui.state import Sequence

PRIORITY_STEP = 10
MAX_PRIORITY = 100
ACTING_HINTS = [
    Hint("⏎", "open", "enter"),
    Hint("k", "cancel", "k"),
    Hint("±", "priority", "plus"),
]


class ActingView(View):
    """A screen with a request under its cursor."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("k", "cancel_request", "Cancel", show=False),
        Binding("plus", "change_priority(1)", "Priority up", show=False),
        Binding("minus", "change_priority(-1)", "Priority down", show=False),
    ]

    def chosen(self) -> Sequence | None:
        """The request to act on."""
        raise NotImplementedError

    def action_cancel_request(self) -> None:
        sequence = self._asked_about()
        if sequence is None:
            return
        request_id, source = sequence.row.request_id, self.session.source

        async def cancel() -> str:
            await source.cancel(request_id)
            return f"{request_id} is cancelled"

        def answered(is_sure: bool | int | None) -> None:
            if is_sure:
                self.watching.act(cancel)

        row = sequence.row
        num_choices = sum(other.row.request_id == row.request_id for other in self.state.sequences)
        whole = f", all {num_choices} choices of it" if num_choices > 1 else ""
        question = f"Cancel this request of {row.user or 'nobody'}{whole}?"
        self.app.push_screen(Confirm(question, about_lines(sequence, self.glyphs), "cancel it"), answered)

    def _asked_about(self) -> Sequence | None:
        """The request to act on; None also when a question is on screen already, as keys may come in faster."""
        return self.chosen() if self.is_active else None

    def action_change_priority(self, direction: int) -> None:
        sequence = self._asked_about()
        if sequence is None:
            return
        request_id, source, now = sequence.row.request_id, self.session.source, sequence.row.priority

        def answered(priority: bool | int | None) -> None:
            if isinstance(priority, bool) or priority is None or priority == now:
                return

            async def change() -> str:
                await source.set_priority(request_id, priority)
                return f"{request_id} has priority {priority}"

            self.watching.act(change)

        question = f"Priority of this request of {sequence.row.user or 'nobody'}, higher is more urgent"
        about = about_lines(sequence, self.glyphs)
        self.app.push_screen(
            Confirm(question, about, "set it", value=now, step=PRIORITY_STEP, limit=MAX_PRIORITY, first=direction),
            answered,
        )
