"""What watching costs: windows side by side."""

import pytest

from pagedd.bench.watched_steps import Round, Window, shares, step_row


def make_round(alone_s: float, watched_s: float) -> Round:
    return Round(Window(alone_s, 2 * alone_s, 0.01, 0.0), Window(watched_s, 2 * watched_s, 0.02, 0.09))


def test_a_drift_from_round_to_round_is_no_cost_of_watching() -> None:
    row = step_row("step", "step_s", [make_round(drift, 1.02 * drift) for drift in (1.0, 1.2, 1.4, 1.1)])
    assert [row[name] for name in ("difference %", "from %", "to %")] == pytest.approx([2.0, 2.0, 2.0])
    assert row["rounds"] == 4


def test_shares_are_the_fronts_part_beyond_its_own_and_the_pagetops_whole() -> None:
    told = shares([make_round(1.0, 1.0)] * 3)
    assert (told["front %"], told["pagetops %"]) == (pytest.approx(1.0), pytest.approx(9.0))
