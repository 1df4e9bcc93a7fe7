"""Figures as text of a fixed width, so that nothing beside them moves; `None` is "not available" and never 0.

The unit is always in the text. Definitions of the figures are in `engine/stats.py`.
"""

from pagedd.client.percent import percent as digits_of

_BYTE_UNITS = ("B  ", "KiB", "MiB", "GiB", "TiB")


def count(value: float | None, width: int, missing: str = "–") -> str:
    """A whole number with its thousands apart, right-aligned: ` 1 284`."""
    return (missing if value is None else f"{round(value):,}".replace(",", " ")).rjust(width)


def percent(ratio: float | None, missing: str = "–") -> str:
    """A ratio of 0–1 in seven cells: ` 61.2 %`, `100.0 %`, ` <0.1 %`."""
    return (missing if ratio is None else digits_of(ratio, decimals=1)).rjust(5) + " %"


def whole_percent(ratio: float | None, missing: str = "–") -> str:
    """A ratio of 0–1 in five cells: ` 61 %`, ` <1 %`."""
    return (missing if ratio is None else digits_of(ratio)).rjust(3) + " %"


def decimal(value: float | None, width: int, decimals: int, missing: str = "–") -> str:
    return (missing if value is None else f"{value:.{decimals}f}").rjust(width)


def milliseconds(seconds: float | None, missing: str = "–") -> str:
    """A latency in eight cells: `  84.2 ms`, ` 1 204 ms`; seconds from ten on."""
    if seconds is None:
        return missing.rjust(5) + " ms"
    if seconds >= 10:
        return count(seconds, 5) + " s "
    return (decimal(seconds * 1000, 5, 1) if seconds < 0.1 else count(seconds * 1000, 5)) + " ms"


def duration(seconds: float | None, missing: str = "–") -> str:
    """A time span in at most nine cells, not aligned: `2.9 s`, `4:07`, `1:02:03`, `3d 04:12`."""
    if seconds is None:
        return missing
    if seconds < 60:
        return f"{max(0.0, seconds):.1f} s"
    minutes, rest_s = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{rest_s:02}" if hours else f"{minutes}:{rest_s:02}"


def size(num_bytes: float | None, missing: str = "–") -> str:
    """Bytes in nine cells: `  6.1 GiB`."""
    if num_bytes is None:
        return missing.rjust(5) + "    "
    value, unit = float(num_bytes), _BYTE_UNITS[0]
    for unit in _BYTE_UNITS:
        if value < 1000 or unit == _BYTE_UNITS[-1]:
            break
        value /= 1024
    return (f"{value:.0f}" if unit == _BYTE_UNITS[0] or value >= 100 else f"{value:.1f}").rjust(5) + " " + unit


def rounded_maximum(value: float) -> float:
    """The next of 1, 2, 5, 10, 20, 50, … that is at least `value`: a bound that seldom changes and is easy to read."""
    bound = 1.0
    while bound < value:
        bound *= 10
    for share in (0.1, 0.2, 0.5):
        if bound * share >= max(value, 1.0):
            return bound * share
    return bound
