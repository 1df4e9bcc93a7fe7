"""A line of the screen before it has colours: text in pieces, each with the role it plays.

Renderables make lines out of numbers, `themes.py` knows what a role looks like. So a screen can be tested as strings,
and printed without a terminal.
"""

import unicodedata
from collections.abc import Iterable, Sequence

from rich.cells import cell_len, set_cell_size

Span = tuple[str, str]
"""(text, role); roles are the names in `themes.ROLES`, "" is plain."""

Line = Sequence[Span]


def text_of(line: Line) -> str:
    return "".join(text for text, _ in line)


def width_of(line: Line) -> int:
    """Cells that the line takes."""
    return sum(cell_len(text) for text, _ in line)


def printable(text: str) -> str:
    """`text` on one line without control characters: a name or an answer must not be able to steer the terminal."""
    if text.isprintable():
        return text
    return "".join(
        " "
        if char in "\n\t\r\u2028\u2029"
        else "\N{REPLACEMENT CHARACTER}"
        if unicodedata.category(char)[0] == "C"
        else char
        for char in text
    )


def fit(text: str, width: int, ellipsis: str = "…") -> str:
    """`text` in exactly `width` cells: padded on the right, or cut with an ellipsis."""
    if width <= 0:
        return ""
    if cell_len(text) <= width:
        return set_cell_size(text, width)
    return (
        set_cell_size(text, width - cell_len(ellipsis)) + ellipsis if width > cell_len(ellipsis) else ellipsis[:width]
    )


def cut(line: Line, width: int) -> list[Span]:
    """The first `width` cells of a line."""
    kept: list[Span] = []
    for text, role in line:
        if width <= 0:
            break
        length = cell_len(text)
        kept.append((text, role) if length <= width else (set_cell_size(text, width), role))
        width -= length
    return kept


def spread(left: Line, right: Line, width: int) -> list[Span]:
    """Both ends of a line `width` cells wide; the left end gives way."""
    room = max(0, width - width_of(right))
    kept = cut(left, max(0, room - 1) if right else room)
    return [*kept, (" " * (room - width_of(kept)), ""), *cut(right, width)]


def join(parts: Iterable[Line], separator: Span) -> list[Span]:
    """Lines one after another, with `separator` between those that are not empty."""
    joined: list[Span] = []
    for part in parts:
        if part:
            joined += [separator, *part] if joined else part
    return joined


def join_as_fits(parts: Sequence[Line], separator: Span, width: int) -> list[Span]:
    """`join` of as many parts as fit whole; of the first one what fits."""
    for num_parts in range(len(parts), 1, -1):
        if width_of(line := join(parts[:num_parts], separator)) <= width:
            return line
    return cut(parts[0], width) if parts else []


def as_fits(parts: Sequence[Line], width: int, gap: str) -> list[Span]:
    """As many parts side by side as fit whole; of the first one what fits."""
    line: list[Span] = []
    for part in parts:
        if line and width_of(line) + len(gap) + width_of(part) > width:
            break
        line += [(gap, ""), *part] if line else cut(part, width)
    return line


def wrap(parts: Sequence[Line], width: int, gap: str) -> list[list[Span]]:
    """Puts parts side by side with `gap` between them, on as few lines as they need; none is broken."""
    lines: list[list[Span]] = []
    used = 0
    for part in parts:
        length = width_of(part)
        if lines and used + len(gap) + length <= width:
            lines[-1] += [(gap, ""), *part]
            used += len(gap) + length
        else:
            lines.append(list(part))
            used = length
    return lines
