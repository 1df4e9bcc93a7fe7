"""From frames to what screens show."""

import msgspec
import pytest

from pagedd.bench.frames import FakeEngine
from pagedd.client.stats_frame import Ending, Event, StatsFrame
from pagedd.tui.state import ENDINGS_KEPT, EVENTS_KEPT, Link, State

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
        figures = {"generation_tokens_total": 50.0 * quarter}
        state.take(frame(uptime_s=10 + quarter / 4, seq=quarter, figures=figures), now_s=NOW_S)
    assert state.rates["output_tokens"] == 200
    assert state.rates["evictions"] is None, "a figure that the daemon does not have"


@pytest.mark.parametrize("jump_s", [7200.0, -7200.0])
def test_a_daemon_whose_clock_is_set_keeps_its_rates_and_its_curves(jump_s: float) -> None:
    state = State()
    for second in range(6):
        figures, time_s = {"generation_tokens_total": 50.0 * second, "kv_usage": second / 10}, 1e5 + second
        moved_s = jump_s if second > 2 else 0.0
        state.take(frame(uptime_s=10.0 + second, time_s=time_s + moved_s, seq=second, figures=figures), now_s=NOW_S)
        assert state.rates["output_tokens"] == (50 if second else None)
    assert state.series["kv_usage"].last(9) == [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]


def test_a_daemon_that_follows_another_continues_its_curves() -> None:
    state = State()
    for uptime_s, kv_usage in ((500.0, 0.1), (501.0, 0.2), (2.0, 0.3)):
        state.take(frame(uptime_s=uptime_s, figures={"kv_usage": kv_usage}), now_s=NOW_S)
    assert state.series["kv_usage"].last(9) == [0.1, 0.2, None, 0.3]


def test_an_engine_in_a_long_step_keeps_what_it_had_and_it_counts_as_old() -> None:
    state = played(20)
    looks, keys = state.pool.looks, [sequence.key for sequence in state.sequences]
    state.take(frame(blocks=None, requests=[], seq=21, uptime_s=5000.0), NOW_S)
    assert (state.pool.looks, [sequence.key for sequence in state.sequences]) == (looks, keys)
    assert state.is_stale(NOW_S)
    state.take(frame(seq=22, uptime_s=5001.0), NOW_S)
    assert not state.is_stale(NOW_S)


@pytest.mark.parametrize("changes", [{"state": "restarting"}, {"state": "loading"}, {"uptime_s": 0.5}, {"seq": 1}])
def test_an_engine_that_is_gone_and_another_daemon_have_nothing_of_what_was(changes: dict[str, object]) -> None:
    state = played(20)
    state.take(frame(**({"blocks": None, "requests": [], "seq": 21, "uptime_s": 5000.0} | changes)), NOW_S)
    assert (state.pool.num_blocks, state.sequences) == (0, [])


def test_how_requests_ended_is_kept_and_bounded() -> None:
    state = State()
    for number in range(ENDINGS_KEPT + 5):
        state.take(frame(endings=[Ending(request_id=f"r{number}", outcome="stop")]), NOW_S)
    assert len(state.endings) == ENDINGS_KEPT
    assert "r4" not in state.endings
    assert state.endings["r5"].outcome == "stop"


def test_a_runs_holders_are_those_who_have_blocks_of_it_alone() -> None:
    state = played(40)
    holders = state.holders(range(200))
    assert [held for _, held in holders] == sorted((held for _, held in holders), reverse=True)
    for sequence, held in holders:
        own = [block for block in sequence.row.block_table if block < 200 and state.pool.ref_counts[block] == 1]
        assert held == len(own)
    assert state.holders(range(900, 901)) == []


def test_age_counts_from_when_the_frame_came() -> None:
    state = State()
    state.take(frame(), now_s=10.0)
    assert not state.is_stale(14.2), "a quarter of a second was the daemon's"
    assert state.is_stale(14.3)
    assert state.age_s(12.5) == 2.5


def test_a_lost_daemon_leaves_everything_on_screen_and_says_why() -> None:
    state = played(5)
    state.lose(Link("lost", "no daemon listens there", 0.5))
    assert state.frame is not None
    assert state.is_stale(NOW_S)
    assert [event.reason for event in state.events] == ["connection lost: no daemon listens there"]
    state.lose(Link("lost", "no daemon listens there", 0.8))
    assert len(state.events) == 1, "each loss is told once"


def reasons(state: State) -> list[str]:
    return [event.reason for event in state.events]


def test_another_daemon_is_noticed_and_its_events_stand_where_they_happened() -> None:
    old = [Event(seq=seq, time_s=100.0 + seq, kind="cancel", reason=f"old {seq}") for seq in (6, 7)]
    new = [Event(seq=seq, time_s=200.0 + seq, kind="model", reason=f"new {seq}") for seq in (1, 2)]
    state = State()
    state.take(frame(time_s=110.0, uptime_s=500.0, seq=90, events=old), NOW_S)
    state.lose(Link("lost", "gone"))
    state.take(frame(time_s=205.0, uptime_s=5.0, seq=1, events=new), NOW_S)
    later = Event(seq=3, time_s=206.0, kind="model", reason="new 3")
    state.take(frame(time_s=207.0, uptime_s=7.0, seq=2, events=[*new, later]), NOW_S)
    assert reasons(state) == [
        *("old 6", "old 7", "connection lost: gone", "new 1", "new 2"),
        *("another daemon answers, 5.0 s after its start", "new 3"),
    ]


def test_events_of_a_daemon_that_was_up_longer_when_it_was_found_are_not_taken_for_old_ones() -> None:
    state = State()
    state.take(frame(uptime_s=5.0, events=[Event(seq=9, time_s=100.0, kind="model", reason="old")]), NOW_S)
    new = [Event(seq=seq, time_s=200.0 + seq, kind="cancel", reason=f"new {seq}") for seq in (1, 9)]
    state.take(frame(uptime_s=50.0, events=new), NOW_S)
    assert reasons(state) == ["old", "new 1", "new 9"]


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
    with_row = frame(requests=[row])
    state.fill_in_previews(with_row)
    assert with_row.requests[0].preview == "Hello"
    assert state.previews == {"r1": "Hello"}


def test_a_frame_of_an_older_daemon_has_no_machine() -> None:
    state = State()
    state.take(frame(machine=None), NOW_S)
    assert state.busy() is None
