"""What stands in the place of the picture while there is none: where a daemon was looked for, and how to start one."""

from textwrap import wrap as wrap_words

from pagedd.tui.glyphs import Glyphs
from pagedd.tui.line import Line, printable
from pagedd.tui.state import Link

WAYS = (
    ("start one", "make run", "in a checkout of pagedd"),
    ("", "systemctl start pagedd", "the installed service"),
    ("", "pagedd --model NAME", "by hand"),
    ("look elsewhere", "pagetop --runtime-dir DIR", "or set PAGEDD_RUNTIME_DIR"),
    ("without one", "pagetop --demo", "a recorded session"),
)
_MARGIN = "  "
_LABEL, _COMMAND = 16, 28


def absent_lines(link: Link, place: str, width: int, glyphs: Glyphs) -> list[Line]:
    """Lines at most `width` wide; `place` is the socket, "" for what is no daemon."""
    if link.state != "lost":
        what = f"connecting to {place}" if place else "nothing has come yet"
        return [[], [(f"{_MARGIN}{printable(what)}{glyphs.ellipsis}", "dim")]]
    lines: list[Line] = [[], [(f"{_MARGIN}No daemon to watch", "strong"), (", retrying", "dim")], []]
    room = max(10, width - 2 * len(_MARGIN))
    lines += [[(_MARGIN, ""), (text, "bad")] for text in wrap_words(printable(link.error), room)]
    if place not in link.error:
        lines.append([(f"{_MARGIN}socket: ", "dim"), (printable(place), "")])
    lines.append([])
    for label, command, meaning in WAYS:
        if width >= len(_MARGIN) + _LABEL + _COMMAND + len(meaning):
            lines.append(
                [(_MARGIN + label.ljust(_LABEL), "dim"), (command.ljust(_COMMAND), "accent"), (meaning, "dim")]
            )
        else:
            lines += [[(f"{_MARGIN}{label}", "dim")]] if label else []
            lines.append([(_MARGIN * 2, ""), (command, "accent")])
    return lines
