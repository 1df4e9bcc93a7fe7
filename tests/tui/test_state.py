"""From frames to what screens show."""

import msgspec

from pagedd.bench.frames import FakeEngine
from pagedd.client.protocol import Event, StatsFrame
from pagedd.tui.state import EVENTS_KEPT, Link, State

from .conftest import NOW_S, played


def frame(**changes: object) -> StatsFrame:
    return msgspec.structs.replace(FakeEngine().frame(), **changes)


def test_the_same_frames_make_the_same_state() -> None:
    first, second = played(40), played(40)
    assert first.rates == second.rates
    assert first.pool.looks == second.pool.looks
    assert [sequence.mark for sequence in first.sequences] == [sequence.mark for sequence in second.sequences]


def test_rates_are_what_counters_grew_by() -> None:
    state = State()
    for quarter in range(8):
        state.take(frame(time_s=1000 + quarter / 4, figures={"generation_tokens_total": 50.0 * quarter}), now_s=NOW_S)
    assert state.rates["output_tokens"] == 200
    assert state.rates["evictions"] is None, "a figure that the daemon does not have"


def test_energy_is_per_token_and_unknown_without_tokens() -> None:
    state = State()
    for second in range(4):
        figures: dict[str, float | None] = {
            "generation_tokens_total": 100.0 * second,
            "gpu_energy_joules": 50.0 * second,
        }
        state.take(frame(time_s=1000.0 + second, figures=figures), NOW_S)
    assert state.joules_per_token == 0.5
    for second in range(4, 20):
        figures = {"generation_tokens_total": 300.0, "gpu_energy_joules": 50.0 * second}
        state.take(frame(time_s=1000.0 + second, figures=figures), NOW_S)
    assert state.joules_per_token is None


def test_a_frame_without_a_map_keeps_the_last_one() -> None:
    state = played(20)
    looks = state.pool.looks
    state.take(frame(blocks=None, requests=[]), NOW_S)
    assert state.pool.looks == looks
    assert state.sequences == []


def test_age_counts_from_when_the_frame_came() -> None:
    state = State()
    state.take(frame(), now_s=10.0)
    assert not state.is_stale(10.9)
    assert state.is_stale(11.1)
    assert state.age_s(12.5) == 2.5


def test_a_lost_daemon_leaves_everything_on_screen_and_says_why() -> None:
    state = played(5)
    state.lose(Link("lost", "no daemon listens there", 0.5))
    assert state.frame is not None
    assert state.is_stale(NOW_S)
    assert [event.reason for event in state.events] == ["connection lost: no daemon listens there"]
    state.lose(Link("lost", "no daemon listens there", 0.8))
    assert len(state.events) == 1, "each loss is told once"


def test_another_daemon_is_noticed_by_its_uptime_and_its_events_count_anew() -> None:
    event = Event(seq=7, time_s=1.0, kind="cancel", reason="old")
    state = State()
    state.take(frame(uptime_s=500.0, events=[event]), NOW_S)
    state.take(frame(uptime_s=2.0, events=[Event(seq=1, time_s=2.0, kind="model", reason="new")]), NOW_S)
    assert [event.reason for event in state.events] == ["old", "another daemon answers, 2.0 s after its start", "new"]


def test_an_event_that_comes_in_many_frames_is_one_event() -> None:
    state = State()
    events = [Event(seq=seq, time_s=1.0, kind="cancel", reason=str(seq)) for seq in range(1, 40)]
    for end in range(10, 40):
        state.take(frame(events=events[max(0, end - 8) : end]), NOW_S)
    assert [event.seq for event in state.events] == list(range(3, 40))


def test_events_are_bounded() -> None:
    state = State()
    events = [Event(seq=seq, time_s=1.0, kind="cancel", reason="") for seq in range(1, 2 * EVENTS_KEPT)]
    state.take(frame(events=events), NOW_S)
    assert len(state.events) == EVENTS_KEPT
    assert state.events[-1].seq == 2 * EVENTS_KEPT - 1


def test_first_words_that_are_learned_later_come_into_the_rows() -> None:
    state = State()
    row = msgspec.structs.replace(FakeEngine().frame().requests[0], request_id="r1", preview="")
    state.previews["r1"] = "Hello"
    state.previews["gone"] = "Bye"
    state.take(frame(requests=[row]), NOW_S)
    assert state.sequences[0].row.preview == "Hello"
    assert state.previews == {"r1": "Hello"}


def test_a_frame_of_an_older_daemon_has_no_machine() -> None:
    state = State()
    state.take(frame(machine=None), NOW_S)
    assert state.busy() is None
