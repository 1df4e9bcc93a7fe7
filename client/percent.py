"""A share as a percentage: one rule for every place that shows one.

It is rounded, half up; but more than nothing never reads as 0 %, and less than all never as 100 %.
"""

from math import floor


def percent(ratio: float, decimals: int = 0) -> str:
    """A ratio of 0–1 without its sign: `61`, `<1`, `>99`; with one decimal `61.2`, `<0.1`, `>99.9`."""
    scale = 10**decimals
    steps = floor(ratio * 100 * scale + 0.5)
    if steps <= 0 < ratio:
        return f"<{1 / scale:.{decimals}f}"
    if ratio < 1 and steps >= 100 * scale:
        return f">{100 - 1 / scale:.{decimals}f}"
    return f"{steps / scale:.{decimals}f}"
