"""How sure a figure is, what an earlier report counted, and processor time."""

import json
import os
import statistics
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from pagedd.bench.watched_pictures import Picture
from pagedd.bench.watched_steps import Round, Window
from pagedd.bench.watching import cpu_s, interval, kept, make_parser, parse

CALM, NOISY = ([1.0 + width * (number % 11 - 5) for number in range(44)] for width in (0.01, 0.1))


@pytest.mark.parametrize(
    ("statistic", "values", "least", "middle", "most"),
    [
        (statistics.median, CALM, 0.98, 1.0, 1.02),
        (statistics.median, NOISY, 0.8, 1.0, 1.2),
        (statistics.fmean, [1.0, 2.0, 3.0, 10.0] * 10, 2.525, 4.0, 5.475),
    ],
    ids=["median, calm", "median, noisy", "mean"],
)
def test_the_interval_holds_the_statistic_and_grows_with_the_noise(
    statistic: Callable[[Sequence[float]], float], values: list[float], least: float, middle: float, most: float
) -> None:
    low, found, high = interval(values, statistic)
    assert least <= low < found < high <= most
    assert found == pytest.approx(middle)


@pytest.mark.parametrize(
    "counted",
    [
        [Picture(0.010, 0.004, 0.006, 0.0), Picture(-0.001, 0.005, 0.007, 0.0)],
        [
            Round(Window(1.0, 2.0, 0.01, 0.0), Window(1.01, 2.02, 0.02, 0.09)),
            Round(Window(1.1, 2.2, 0.01, 0.0), Window(1.0, 2.0, 0.02, 0.09)),
        ],
    ],
    ids=["pictures", "rounds"],
)
def test_what_a_report_counted_is_taken_on(counted: list[Picture] | list[Round], tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(json.dumps({"kept": [asdict(one) for one in counted]}))
    assert kept(tmp_path / "report.json", type(counted[0])) == counted


def test_nothing_can_be_appended_to_no_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["watched", "--append"])
    with pytest.raises(SystemExit, match="2"):
        parse(make_parser(None, "rounds"))
    assert "--append needs --output FILE" in capsys.readouterr().err


def test_processor_time_is_that_of_all_threads() -> None:
    before = cpu_s(os.getpid())
    worker = threading.Thread(target=lambda: sum(range(3_000_000)))
    worker.start()
    while worker.is_alive():
        now = cpu_s(os.getpid())
    worker.join()
    assert now > before
