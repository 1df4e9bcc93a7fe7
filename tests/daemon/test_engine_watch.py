"""When silence of the engine is too long. Time is scripted."""

import pytest

from pagedd.daemon.config import DaemonConfig
from pagedd.daemon.engine_link import IDLE_INTERVAL_S
from pagedd.daemon.engine_watch import TICK_S, EngineWatch, Progress, SilenceLimits
from pagedd.daemon.setting import settings_of


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(clock: Clock) -> EngineWatch:
    return EngineWatch(SilenceLimits(stalled_s=2, hung_s=5, load_s=20), clock)


def after(watch: EngineWatch, clock: Clock, seconds: float, *, is_loading: bool = False) -> Progress:
    progress = Progress.ADVANCING
    for _ in range(round(seconds / TICK_S)):
        clock.now_s += TICK_S
        progress = watch.tick(is_loading=is_loading)
    return progress


def test_a_long_step_is_stalled_and_then_hung(watch: EngineWatch, clock: Clock) -> None:
    assert after(watch, clock, 1.5) is Progress.ADVANCING
    assert after(watch, clock, 0.5) is Progress.STALLED
    assert after(watch, clock, 2.5) is Progress.STALLED
    assert after(watch, clock, 0.5) is Progress.HUNG


def test_each_word_begins_the_wait_anew_however_long_the_work_goes_on(watch: EngineWatch, clock: Clock) -> None:
    for _ in range(100):
        assert after(watch, clock, 1.5) is Progress.ADVANCING
        watch.heard()


def test_a_load_has_a_limit_of_its_own_and_is_never_stalled(watch: EngineWatch, clock: Clock) -> None:
    assert after(watch, clock, 19.5, is_loading=True) is Progress.ADVANCING
    assert after(watch, clock, 0.5, is_loading=True) is Progress.HUNG


def test_time_in_which_the_front_itself_stood_still_does_not_count(watch: EngineWatch, clock: Clock) -> None:
    clock.now_s += 3600
    assert watch.tick(is_loading=False) is Progress.ADVANCING


def test_the_settings_make_the_limits() -> None:
    limits = SilenceLimits.of(DaemonConfig(step_timeout_seconds=40, load_timeout_seconds=90))
    assert (limits.stalled_s, limits.hung_s, limits.load_s) == (10, 40, 90)


def test_an_idle_engine_is_not_taken_for_one_that_stalls_however_small_the_limit(clock: Clock) -> None:
    smallest = next(item for item in settings_of(DaemonConfig) if item.name == "step_timeout_seconds").minimum
    assert smallest is not None
    watch = EngineWatch(SilenceLimits.of(DaemonConfig(step_timeout_seconds=smallest)), clock)
    for _ in range(100):
        # It speaks once a second, and a tick may be late.
        assert after(watch, clock, IDLE_INTERVAL_S + 2 * TICK_S) is Progress.ADVANCING
        watch.heard()
