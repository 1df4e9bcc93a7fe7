"""What watching costs: windows side by side, and how sure their difference is."""

import json
import os
import threading
from dataclasses import asdict
from pathlib import Path

import pytest

from pagedd.bench.watched_steps import Round, Window, cpu_s, kept_rounds, median_interval, shares, step_row


def make_round(alone_s: float, watched_s: float) -> Round:
    return Round(Window(alone_s, 2 * alone_s, 0.01, 0.0), Window(watched_s, 2 * watched_s, 0.02, 0.09))


def test_a_drift_from_round_to_round_is_no_cost_of_watching() -> None:
    row = step_row("step", "step_s", [make_round(drift, 1.02 * drift) for drift in (1.0, 1.2, 1.4, 1.1)])
    assert [row[name] for name in ("difference %", "from %", "to %")] == pytest.approx([2.0, 2.0, 2.0])
    assert row["rounds"] == 4


def test_the_interval_holds_the_median_and_grows_with_the_noise() -> None:
    calm, noisy = ([1.0 + width * (number % 11 - 5) for number in range(44)] for width in (0.01, 0.1))
    for values, least, most in ((calm, 0.98, 1.02), (noisy, 0.8, 1.2)):
        low, middle, high = median_interval(values)
        assert least <= low < middle < high <= most
        assert middle == pytest.approx(1.0)


def test_shares_are_the_fronts_part_beyond_its_own_and_the_pagetops_whole() -> None:
    told = shares([make_round(1.0, 1.0)] * 3)
    assert (told["front %"], told["pagetops %"]) == (pytest.approx(1.0), pytest.approx(9.0))


def test_the_rounds_of_a_report_are_taken_on(tmp_path: Path) -> None:
    rounds = [make_round(1.0, 1.01), make_round(1.1, 1.0)]
    (tmp_path / "report.json").write_text(json.dumps({"kept": [asdict(one) for one in rounds]}))
    assert kept_rounds(tmp_path / "report.json") == rounds


def test_processor_time_is_that_of_all_threads() -> None:
    before = cpu_s(os.getpid())
    worker = threading.Thread(target=lambda: sum(range(3_000_000)))
    worker.start()
    while worker.is_alive():
        now = cpu_s(os.getpid())
    worker.join()
    assert now > before
