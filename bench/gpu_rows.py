"""Rows of the table that `gpu_check.py` prints: a figure, or why there is none."""

import traceback
from collections.abc import Callable, Iterable, Iterator

from pagedd.bench.report import Cell

Row = dict[str, Cell]


def row(what: str, value: float, unit: str, share: float | None = None) -> Row:
    """A figure, and its share of a ceiling where it has one."""
    return {
        "what": what,
        "value": float(f"{value:.4g}"),
        "unit": unit,
        "share": None if share is None else round(share, 3),
    }


def attempt(what: str, call: Callable[[], Iterable[Row]]) -> Iterator[Row]:
    """Gives what `call` finds and, where that ends with an error, a row of the unit "failed" that says why."""
    try:
        yield from call()
    except AssertionError as error:
        yield _failure(f"{what}: {error}")
    except Exception as error:
        traceback.print_exc()
        yield _failure(f"{what}: {type(error).__name__}: {error}")


def _failure(what: str) -> Row:
    return {"what": what[:200], "value": None, "unit": "failed", "share": None}
