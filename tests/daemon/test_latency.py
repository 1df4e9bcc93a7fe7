"""Percentiles of the last minute: right within a bin, forgetful, bounded."""

import pytest

from pagedd.daemon.latency import WINDOW_S, LatencyWindow


class Clock:
    now = 500.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def window(clock: Clock) -> LatencyWindow:
    return LatencyWindow(clock)


def test_without_observations_there_is_no_percentile(window: LatencyWindow) -> None:
    assert window.percentile(0.5) is None


@pytest.mark.parametrize(("share", "expected_s"), [(0.0, 0.01), (0.5, 0.05), (0.9, 0.09), (0.99, 0.1), (1.0, 0.1)])
def test_a_percentile_is_right_within_two_percent(window: LatencyWindow, share: float, expected_s: float) -> None:
    for hundredths in range(1, 11):
        window.observe(hundredths / 100)
    assert window.percentile(share) == pytest.approx(expected_s, rel=0.021)


def test_an_observation_may_count_several_times(window: LatencyWindow) -> None:
    window.observe(0.1, times=98)
    window.observe(1.0, times=2)
    assert window.percentile(0.5) == pytest.approx(0.1, rel=0.021)
    assert window.percentile(0.99) == pytest.approx(1.0, rel=0.021)


def test_what_is_older_than_the_window_is_forgotten(window: LatencyWindow, clock: Clock) -> None:
    window.observe(5.0)
    clock.now += WINDOW_S / 2
    window.observe(1.0)
    assert window.percentile(1.0) == pytest.approx(5.0, rel=0.021)
    clock.now += WINDOW_S / 2 + 1
    assert window.percentile(1.0) == pytest.approx(1.0, rel=0.021)
    clock.now += WINDOW_S
    assert window.percentile(1.0) is None


@pytest.mark.parametrize(("duration_s", "shown_s"), [(0.0, 1e-4), (-1.0, 1e-4), (1e9, 1e4)])
def test_durations_beyond_the_bins_count_as_the_nearest(
    window: LatencyWindow, duration_s: float, shown_s: float
) -> None:
    window.observe(duration_s)
    assert window.percentile(0.5) == pytest.approx(shown_s, rel=0.05)
