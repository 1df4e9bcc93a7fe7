"""When an engine is followed by another, with a clock that only the test moves."""

import pytest

from pagedd.daemon.restart_policy import DEVICE_PATIENCE_S, MAX_FAILED_LOADS, RestartPolicy, on_the_cpu
from pagedd.engine.config import EngineConfig


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def absences(
    policy: RestartPolicy, clock: Clock, seconds: float, code: str = "device_unavailable"
) -> list[float | None]:
    """What the policy says to tries that fail for so long, each after the pause that it asked for."""
    end, said = clock.now + seconds, []
    while clock.now < end:
        said.append(policy.after_failed_load(code))
        if said[-1] is None or policy.has_fallen_back:
            break
        clock.now += said[-1]
    return said


def test_pauses_grow_and_a_long_life_shortens_them_again() -> None:
    policy = RestartPolicy()
    assert [policy.after_serving(1) for _ in range(4)] == [0.25, 0.5, 1.0, 2.0]
    assert policy.after_serving(61) == 0.25
    assert max(policy.after_serving(1) for _ in range(20)) == 30


@pytest.mark.parametrize(
    "code", ["invalid_setting", "unsupported_model", "unsupported_device", "model_unavailable", "poor_kv_quality"]
)
def test_what_waiting_does_not_change_is_not_tried_again_but_where_it_has_served(code: str) -> None:
    policy = RestartPolicy()
    assert policy.after_failed_load(code) is None
    policy.after_serving(1)
    assert None not in [policy.after_failed_load(code) for _ in range(50)]


def test_loading_is_given_up_after_a_few_tries_but_never_once_it_has_served() -> None:
    policy = RestartPolicy()
    said = [policy.after_failed_load("engine_died") for _ in range(MAX_FAILED_LOADS)]
    assert said[-1] is None
    assert None not in said[:-1]
    policy.after_serving(1)
    assert None not in [policy.after_failed_load(None) for _ in range(50)]


def test_a_device_that_comes_after_ten_seconds_is_waited_for(clock: Clock) -> None:
    policy = RestartPolicy(clock=clock)
    said = absences(policy, clock, 10)
    assert len(said) > MAX_FAILED_LOADS
    assert None not in said
    assert policy.after_serving(5) <= 30


def test_a_device_that_stays_away_is_given_up_before_the_first_success_and_awaited_after_it(clock: Clock) -> None:
    policy = RestartPolicy(clock=clock)
    assert absences(policy, clock, 2 * DEVICE_PATIENCE_S)[-1] is None
    served = RestartPolicy(clock=clock)
    served.after_serving(100)
    assert None not in absences(served, clock, 1000 * DEVICE_PATIENCE_S)
    assert not served.has_fallen_back


@pytest.mark.parametrize("code", ["device_unavailable", "out_of_memory", "no_kv_memory"])
@pytest.mark.parametrize("has_served", [False, True])
def test_the_cpu_takes_over_only_after_the_patience_and_only_where_it_may(
    clock: Clock, has_served: bool, code: str
) -> None:
    policy = RestartPolicy(can_fall_back=True, clock=clock)
    if has_served:
        policy.after_serving(100)
    started = clock.now
    assert absences(policy, clock, 10 * DEVICE_PATIENCE_S, code)[-1] == 0.0
    assert policy.has_fallen_back
    assert clock.now - started >= DEVICE_PATIENCE_S


def test_a_device_that_can_never_serve_is_replaced_at_once_where_that_is_configured() -> None:
    policy = RestartPolicy(can_fall_back=True)
    assert policy.after_failed_load("unsupported_device") == 0.0
    assert policy.has_fallen_back
    assert policy.after_failed_load("unsupported_device") is None


def test_a_device_that_is_away_for_the_cpu_as_well_is_awaited_with_pauses(clock: Clock) -> None:
    policy = RestartPolicy(can_fall_back=True, clock=clock)
    policy.after_failed_load("device_unavailable")
    clock.now += 100
    assert policy.after_failed_load("device_unavailable") == 0.0
    assert policy.has_fallen_back
    policy.after_serving(1.0)
    for _ in range(3):
        clock.now += 100
        delay_s = policy.after_failed_load("device_unavailable")
        assert delay_s is not None
        assert delay_s > 0


def test_a_device_that_was_there_meanwhile_has_not_been_away_all_the_time(clock: Clock) -> None:
    policy = RestartPolicy(can_fall_back=True, clock=clock)
    policy.after_serving(1)
    policy.after_failed_load("device_unavailable")
    clock.now += 5
    policy.after_failed_load("internal")
    clock.now += DEVICE_PATIENCE_S
    policy.after_failed_load("device_unavailable")
    assert not policy.has_fallen_back


def test_an_absence_that_ended_does_not_count_towards_the_next(clock: Clock) -> None:
    policy = RestartPolicy(can_fall_back=True, clock=clock)
    absences(policy, clock, DEVICE_PATIENCE_S / 2)
    policy.after_serving(1)
    clock.now += 10 * DEVICE_PATIENCE_S
    policy.after_failed_load("device_unavailable")
    assert not policy.has_fallen_back


def test_what_was_meant_for_a_card_does_not_bind_the_cpu() -> None:
    config = EngineConfig(
        model="m", device="cuda:1", kv_cache_dtype="fp16", gpu_memory_utilization=0.95, max_num_seqs=7
    )
    assert on_the_cpu(config) == EngineConfig(model="m", device="cpu", max_num_seqs=7)
