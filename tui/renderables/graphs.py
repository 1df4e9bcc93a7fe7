"""Graphs of the last moments: braille columns, two values a cell, filled from below.

The bound is given, never taken from the data shown: a graph that rescales itself lies about change.
"""

from collections.abc import Sequence

from pagedd.tui.glyphs import Glyphs

# Dots of a braille cell from the bottom up, in its left and its right column.
_LEFT = (0x40, 0x04, 0x02, 0x01)
_RIGHT = (0x80, 0x20, 0x10, 0x08)
_BRAILLE = 0x2800


def graph(values: Sequence[float | None], maximum: float, width: int, height: int, glyphs: Glyphs) -> list[str]:
    """`height` lines of `width` cells, top first, the newest value at the right edge. `None` leaves a gap.

    A value above 0 shows at least one dot, so that idle and silent differ.
    """
    if glyphs.is_unicode:
        return _braille(values, maximum, width, height)
    return _levels(values, maximum, width, height, glyphs.level)


def _braille(values: Sequence[float | None], maximum: float, width: int, height: int) -> list[str]:
    heights = _heights(values, maximum, width * 2, height * 4)
    lines = []
    for row in range(height):
        below = (height - 1 - row) * 4
        lines.append(
            "".join(
                chr(_BRAILLE | _column(_LEFT, heights[at] - below) | _column(_RIGHT, heights[at + 1] - below))
                for at in range(0, width * 2, 2)
            )
        )
    return lines


def _column(dots: tuple[int, ...], num_dots: int) -> int:
    return sum(dots[: max(0, min(4, num_dots))])


def _levels(values: Sequence[float | None], maximum: float, width: int, height: int, levels: str) -> list[str]:
    steps = len(levels) - 1
    heights = _heights(values, maximum, width, height * steps)
    return [
        "".join(levels[max(0, min(steps, value - (height - 1 - row) * steps))] for value in heights)
        for row in range(height)
    ]


def _heights(values: Sequence[float | None], maximum: float, num_columns: int, top: int) -> list[int]:
    newest = list(values)[-num_columns:]
    heights = [
        0 if value is None or value <= 0 or maximum <= 0 else max(1, min(top, round(value / maximum * top)))
        for value in newest
    ]
    return [0] * (num_columns - len(heights)) + heights
