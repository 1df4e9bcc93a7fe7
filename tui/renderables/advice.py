"""The first piece of the daemon's advice in a few words; `pagectl doctor` has all of it."""

from rich.markup import escape

from pagedd.tui.line import printable
from pagedd.tui.state import State


def advice_words(state: State) -> str:
    """For a border, which reads markup. Empty when there is no advice."""
    advice = state.frame.advice if state.frame is not None else []
    if not advice:
        return ""
    # Whatever does not fit is cut from the end.
    which = f", 1 of {len(advice)}" if len(advice) > 1 else ""
    return escape(f"pagectl doctor{which}: {printable(advice[0].finding)}")
