"""What a person should know now, in some lines above the keys: how old the picture is, what came of an action."""

from dataclasses import dataclass
from textwrap import wrap as wrap_words

from pagedd.tui.glyphs import Glyphs
from pagedd.tui.line import Line, fit, printable
from pagedd.tui.renderables import numbers
from pagedd.tui.state import State

_MAX_LINES = 3
# Screens with fewer rows have none to spare.
_LOW = 30


@dataclass(frozen=True, slots=True)
class Notice:
    """Words of the viewer itself. `role` is one of `themes.ROLES`; what `is_lasting` must leave room for the rest."""

    text: str
    role: str = "accent"
    is_lasting: bool = False


def age_notice(state: State, age_s: float) -> Notice:
    """Why the picture is grey, or the last one; `age_s` is how old it is."""
    age = numbers.duration(age_s)
    if state.link.state == "lost":
        return Notice(f"disconnected, retrying: all above is {age} old. {state.link.error}", "bad", is_lasting=True)
    if state.link.state == "ended":
        return Notice(f"nothing after this can be shown. {state.link.error}", "bad", is_lasting=True)
    if state.is_held:
        reason = state.frame.detail if state.frame is not None else ""
        return Notice(f"{reason}. Blocks and requests are those of before it", "bad", is_lasting=True)
    return Notice(f"no picture for {age}: the daemon is there and says nothing", "bad", is_lasting=True)


def notice_lines(notice: Notice, width: int, height: int, glyphs: Glyphs) -> list[Line]:
    """At most three lines, one for what lasts on a low screen; what does not fit on them ends in an ellipsis."""
    max_lines = 1 if notice.is_lasting and height < _LOW else _MAX_LINES
    sign = f" {glyphs.warning if notice.role == 'bad' else glyphs.selected} "
    room = max(1, width - len(sign) - 1)
    words = wrap_words(printable(notice.text), room) or [""]
    if len(words) > max_lines:
        words = [*words[: max_lines - 1], fit(" ".join(words[max_lines - 1 :]), room, glyphs.ellipsis)]
    return [
        [((sign if row == 0 else " " * len(sign)), notice.role), (text, notice.role)] for row, text in enumerate(words)
    ]
