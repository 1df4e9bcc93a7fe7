"""Histories are bounded, rates survive a restart, and time that jumps is no lie."""

import pytest

from pagedd.tui.history import SECONDS_KEPT, Rate, Series


def test_a_second_has_the_mean_of_its_values() -> None:
    series = Series()
    for time_s, value in ((10.0, 1.0), (10.25, 3.0), (11.0, 8.0)):
        series.add(time_s, value)
    assert series.last(5) == [2.0, 8.0]


def test_seconds_without_a_frame_are_gaps_and_so_is_what_is_not_known() -> None:
    series = Series()
    series.add(10.0, 1.0)
    series.add(13.0, None)
    assert series.last(9) == [1.0, None, None, None]
    assert series.maximum(9) == 1.0
    assert Series().maximum(9) == 0.0


def test_a_history_is_bounded_however_long_the_gap() -> None:
    series = Series()
    series.add(0.0, 1.0)
    series.add(1e9, 2.0)
    assert len(series.last(10**6)) == SECONDS_KEPT


def test_time_that_went_back_starts_afresh() -> None:
    series = Series()
    series.add(100.0, 1.0)
    series.add(50.0, 2.0)
    assert series.last(9) == [2.0]


def test_a_rate_is_over_the_last_second() -> None:
    rate = Rate()
    assert rate.add(0.0, 0) is None
    assert rate.add(0.5, 10) == 20
    assert rate.add(1.0, 20) == 20
    assert rate.add(2.0, 20) == pytest.approx(0)


def test_a_counter_that_shrank_was_restarted() -> None:
    rate = Rate()
    rate.add(0.0, 1000)
    assert rate.add(1.0, 3) is None
    assert rate.add(2.0, 5) == 2


def test_a_figure_that_is_not_there_has_no_rate() -> None:
    rate = Rate()
    rate.add(0.0, 5)
    assert rate.add(1.0, None) is None
