"""The scheduler alone: what is simulated, and what is counted."""

import pytest

from pagedd.bench.scheduler import simulate


def test_all_seats_are_taken_while_it_is_measured() -> None:
    cost = simulate(1000, 16, 400, step_s=0.002, num_steps=20)
    assert cost.mean_running == pytest.approx(16, abs=1)
    assert cost.core_share > 0
    assert cost.step_p50_s <= cost.step_p99_s
    assert cost.row()["seats"] == 16


def test_a_pool_that_does_not_hold_all_seats_is_no_measurement() -> None:
    with pytest.raises(RuntimeError, match="20 blocks are too few for 16 seats"):
        simulate(1000, 16, 20, step_s=0.002, num_steps=20)
