"""The line of keys at the bottom: each key with what it does here, and which of them a mouse is on."""

from dataclasses import dataclass, replace

from pagedd.tui.glyphs import UNICODE, Glyphs
from pagedd.tui.line import Line, Span


@dataclass(frozen=True, slots=True)
class Hint:
    """`key` as shown, what it does, and the name that the terminal library has for it."""

    key: str
    label: str
    press: str

    @property
    def width(self) -> int:
        return len(self.key) + 1 + len(self.label)


_GAP = 2


def spelled(hints: list[Hint], glyphs: Glyphs) -> list[Hint]:
    """The hints with keys as these glyphs write them."""
    spelling = {UNICODE.enter: glyphs.enter, UNICODE.plus_minus: glyphs.plus_minus}
    return [replace(hint, key=spelling.get(hint.key, hint.key)) for hint in hints]


def placed(hints: list[Hint], width: int) -> list[tuple[int, Hint]]:
    """(first cell, hint) for those that fit; what does not fit is left out, and help has it."""
    found = []
    at = 1
    for hint in hints:
        if at + hint.width > width:
            break
        found.append((at, hint))
        at += hint.width + _GAP
    return found


def footer_line(hints: list[Hint], width: int) -> Line:
    line: list[Span] = []
    end = 0
    for at, hint in placed(hints, width):
        line += [(" " * (at - end), ""), (hint.key, "key"), (f" {hint.label}", "dim")]
        end = at + hint.width
    return line


def hint_at(hints: list[Hint], width: int, x: int) -> Hint | None:
    return next((hint for at, hint in placed(hints, width) if at <= x < at + hint.width), None)
