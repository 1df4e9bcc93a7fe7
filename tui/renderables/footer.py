"""The line of keys at the bottom: each key with what it does here, and which of them a mouse is on."""

from dataclasses import dataclass, replace

from pagedd.tui.glyphs import UNICODE, Glyphs
from pagedd.tui.line import Line, Span


@dataclass(frozen=True, slots=True)
class Hint:
    """`key` as shown, what it does, and the name that the terminal library has for it.

    `short` stands in the place of the label on narrow screens.
    """

    key: str
    label: str
    press: str
    short: str | None = None

    @property
    def words(self) -> str:
        return f" {self.label}" if self.label else ""

    @property
    def width(self) -> int:
        return len(self.key) + len(self.words)


_GAP = 2
# On narrower screens, keys that act matter more than the names of screens.
_WIDE = 100


def spelled(hints: list[Hint], glyphs: Glyphs) -> list[Hint]:
    """The hints with keys as these glyphs write them."""
    spelling = {UNICODE.enter: glyphs.enter, UNICODE.plus_minus: glyphs.plus_minus}
    return [replace(hint, key=spelling.get(hint.key, hint.key)) for hint in hints]


def placed(hints: list[Hint], width: int) -> list[tuple[int, Hint]]:
    """(first cell, hint) for those that fit. What does not is left out, and help has it.

    The last two are how to get help and how to leave: they go last.
    """
    if width < _WIDE:
        hints = [hint if hint.short is None else replace(hint, label=hint.short) for hint in hints]
    ways_out = hints[-2:]
    room = width - sum(hint.width + _GAP for hint in ways_out)
    found: list[tuple[int, Hint]] = []
    at = 1
    for limit, group in ((room, hints[:-2]), (width, ways_out)):
        for hint in group:
            if at + hint.width > limit:
                break
            found.append((at, hint))
            at += hint.width + _GAP
    return found


def footer_line(hints: list[Hint], width: int) -> Line:
    line: list[Span] = []
    end = 0
    for at, hint in placed(hints, width):
        line += [(" " * (at - end), ""), (hint.key, "key"), (hint.words, "dim")]
        end = at + hint.width
    return line


def hint_at(hints: list[Hint], width: int, x: int) -> Hint | None:
    return next((hint for at, hint in placed(hints, width) if at <= x < at + hint.width), None)
