"""Bars: a share of a fixed whole."""

from pagedd.tui.glyphs import Glyphs
from pagedd.tui.line import Span


def bar(ratio: float | None, width: int, glyphs: Glyphs, role: str = "bar") -> list[Span]:
    """A bar `width` cells wide, its two ends included. `None` is an empty bar: not available."""
    inside = width - 2
    if inside < 1:
        return []
    return [(glyphs.bar_ends[0], "frame"), *fill(ratio, inside, glyphs, role), (glyphs.bar_ends[1], "frame")]


def fill(ratio: float | None, width: int, glyphs: Glyphs, role: str = "bar") -> list[Span]:
    """The bar's inside. More than nothing shows at least its smallest step; less than all is never quite full."""
    steps = len(glyphs.bar) - 1
    total = width * steps
    share = min(1.0, max(0.0, ratio or 0.0))
    filled = round(share * total)
    if share > 0:
        filled = max(1, filled)
    if share < 1:
        filled = min(total - 1, filled)
    whole, part = divmod(filled, steps)
    text = glyphs.bar[-1] * whole + (glyphs.bar[part] if part else "")
    return [(text, role), (" " * (width - len(text)), "track")]


def stacked(shares: list[tuple[float, str, str]], width: int) -> list[Span]:
    """Parts of one whole side by side, each (share of 0–1, one-cell glyph, role), the last one taking the rest.

    A part that is not nothing gets at least one cell, as long as there are cells.
    """
    spans: list[Span] = []
    left = width
    for position, (share, glyph, role) in enumerate(shares):
        is_last = position == len(shares) - 1
        cells = left if is_last else min(left, max(1 if share > 0 else 0, round(share * width)))
        spans.append((glyph * cells, role))
        left -= cells
    return spans
