"""A picture of each case: how many times better every figure became, as published and as measured here.

matplotlib is needed here alone (`requirements-plots.lock`), and imported when a picture is drawn.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from pagedd.bench.case_gain import Gain, arrow

_PUBLISHED, _MEASURED = "#9aa0a6", "#1a73e8"
_BAR = 0.36


def draw_pictures(gains: Mapping[str, Sequence[Gain]], folder: Path) -> None:
    """`case-NAME.png` for each case."""
    folder.mkdir(parents=True, exist_ok=True)
    for case, of in gains.items():
        _draw(case, of, folder / f"case-{case.replace(' ', '-')}.png")


def _draw(case: str, gains: Sequence[Gain], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.9 + 0.85 * len(gains)), layout="constrained")
    axes = figure.subplots()
    for row, gain in enumerate(reversed(gains)):
        sides = (
            (row + _BAR / 2, gain.published_gain, gain.published, _PUBLISHED, "published, no source known"),
            (row - _BAR / 2, gain.measured_gain, gain.measured, _MEASURED, "measured here"),
        )
        for height, times, pair, colour, label in sides:
            axes.barh(height, times - 1, _BAR, left=1, color=colour, label=label if row == 0 else None)
            text = f"{times:.1f}×  ({arrow(pair)} {gain.unit})"
            axes.annotate(text, (times, height), (4, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_yticks(range(len(gains)), [gain.figure for gain in reversed(gains)])
    axes.set_xscale("log", base=2)
    axes.set_xlim(1, 6 * max(max(gain.published_gain, gain.measured_gain) for gain in gains))
    axes.xaxis.set_major_formatter("{x:g}×")
    axes.set_title(f"{case}: times better with it than without", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper right", frameon=False)
    figure.savefig(path, dpi=110)
