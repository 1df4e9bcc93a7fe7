"""The log of events: bounded, numbered, and no caller's words in it."""

import pytest

from pagedd.client.errors import ERROR_KINDS
from pagedd.daemon.engine_state import EngineState
from pagedd.daemon.events import EVENTS_KEPT, EventLog
from pagedd.engine.request import Preemption

from .scripted_host import engine_info


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log(clock: Clock) -> EventLog:
    return EventLog(clock, to_unix_s=lambda at_s: at_s)


def told(log: EventLog) -> list[tuple[str, str, str]]:
    return [(event.kind, event.reason, event.request_id) for event in log.newest()]


def test_refusals_of_two_kinds_in_turn_do_not_push_everything_else_out() -> None:
    clock = [0.0]
    log = EventLog(lambda: clock[0])
    log.add("engine", "ready")
    for number in range(300):
        clock[0] += 0.001
        log.refused(("prompt_too_long", "queue_full")[number % 2], "scripted")
    assert [event.reason for event in log.newest()] == ["ready", "prompt_too_long: scripted", "queue_full: scripted"]


@pytest.mark.parametrize("jump_s", [7200.0, -7200.0])
def test_a_clock_that_is_set_lets_no_refusal_through_and_tears_no_burst(clock: Clock, jump_s: float) -> None:
    moved_s = 0.0
    log = EventLog(clock, to_unix_s=lambda at_s: at_s + moved_s)
    for total in (0, 3, 4, 9):
        log.refused("queue_full", "scripted")
        log.saw_evictions(total)
        clock.now += 0.25
        moved_s = jump_s
    clock.now += 1.0
    assert [reason for _, reason, _ in told(log)] == [
        "queue_full: scripted",
        "9 cached blocks were taken for new tokens within 0.5 s",
    ]
    assert [event.time_s for event in log.newest()] == [1000.0, 1000.75 + jump_s]


def test_the_newest_are_kept_and_numbered_without_a_gap(log: EventLog) -> None:
    for i in range(EVENTS_KEPT + 5):
        log.add("cancel", str(i))
    events = log.newest()
    assert [event.seq for event in events] == list(range(6, EVENTS_KEPT + 6))
    assert [event.reason for event in log.newest(2)] == [str(EVENTS_KEPT + 3), str(EVENTS_KEPT + 4)]


def test_a_burst_of_evictions_is_one_event_once_it_is_over(log: EventLog, clock: Clock) -> None:
    for total in (0, 3, 4, 9):
        log.saw_evictions(total)
        clock.now += 0.25
    assert told(log) == []
    clock.now += 1.0
    assert told(log) == [("eviction", "9 cached blocks were taken for new tokens within 0.5 s", "")]
    assert log.newest()[0].time_s == 1000.75
    log.saw_evictions(10)
    clock.now += 1.0
    assert told(log)[1:] == [("eviction", "1 cached block was taken for new tokens within 0.0 s", "")]


def test_evictions_without_end_are_told_in_parts(log: EventLog, clock: Clock) -> None:
    for total in range(1, 31):
        log.saw_evictions(total)
        clock.now += 0.5
    assert [event.reason for event in log.newest()] == ["20 cached blocks were taken for new tokens within 9.5 s"]


def test_another_engine_counts_its_evictions_anew(log: EventLog, clock: Clock) -> None:
    log.saw_evictions(7)
    clock.now += 2
    log.saw_evictions(2)
    clock.now += 2
    assert [reason.split()[0] for _, reason, _ in told(log)] == ["7", "2"]


def test_a_preemption_names_victim_and_winner(log: EventLog) -> None:
    log.preempted([Preemption(request_id="low", choice_index=0, by_request_id="high", for_what="seat")])
    log.preempted([Preemption(request_id="low", choice_index=0, by_request_id="high", for_what="blocks")])
    assert told(log) == [
        ("preemption", "request high needed its seat", "low"),
        ("preemption", "request high needed its blocks", "low"),
    ]


@pytest.mark.parametrize("code", ["model_not_found", "invalid_value", "template_error", "request_not_found"])
def test_a_refusal_that_may_quote_the_caller_is_told_by_its_meaning(log: EventLog, code: str) -> None:
    log.refused(code, "'my secret' is not here")
    assert told(log) == [("refusal", f"{code}: {ERROR_KINDS[code].meaning}", "")]


def test_a_refusal_names_the_field(log: EventLog) -> None:
    log.refused("invalid_value", "temperature = 9; accepted: 0 to 2", field="temperature")
    log.refused("invalid_value", "top_p = 9; accepted: 0 to 1", field="top_p")
    assert [reason for _, reason, _ in told(log)] == [
        "invalid_value (temperature): A field has a value outside its documented range.",
        "invalid_value (top_p): A field has a value outside its documented range.",
    ]


def test_a_refusal_of_numbers_is_told_with_them(log: EventLog) -> None:
    log.refused("queue_full", "8 wait and 1 came, limit 8", "r")
    assert told(log) == [("refusal", "queue_full: 8 wait and 1 came, limit 8", "r")]


def test_the_same_refusal_in_a_loop_is_told_once_a_second(log: EventLog, clock: Clock) -> None:
    log.add("engine", "ready")
    for _ in range(3 * EVENTS_KEPT):
        log.refused("malformed_message", "x")
        clock.now += 1 / 256
    assert [kind for kind, _, _ in told(log)] == ["engine", "refusal", "refusal", "refusal"]


def test_the_engines_life_is_told_without_its_progress(log: EventLog) -> None:
    log.engine_is(EngineState.STARTING, "engine process", None)
    for percent in range(3):
        log.engine_is(EngineState.LOADING, f"{percent} %", None)
    log.engine_is(EngineState.READY, "", engine_info(device_name="a card"))
    log.engine_is(EngineState.RESTARTING, "the engine process (pid 7) was ended by SIGKILL", None)
    log.engine_is(EngineState.FAILED, "no_kv_memory: 0 bytes", None)
    assert told(log) == [
        ("engine", "ready: 256 blocks of 16 tokens on a card", ""),
        ("engine", "the engine process (pid 7) was ended by SIGKILL; another is started", ""),
        ("engine", "failed: no_kv_memory: 0 bytes", ""),
    ]


def test_a_quotas_refusal_has_its_numbers_and_a_loop_of_them_is_told_once_a_second() -> None:
    clock = Clock()
    log = EventLog(clock)
    for num_tokens in (900, 901, 902):
        log.refused("over_quota", f"{num_tokens} tokens needed, 100 left of 1000 a minute; try again in 48 s")
    assert [event.reason for event in log.newest()] == [
        "over_quota: 900 tokens needed, 100 left of 1000 a minute; try again in 48 s"
    ]
