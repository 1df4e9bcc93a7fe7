"""Pictures of the pool, of sequences and of single blocks, between two steps; block size 4."""

import pytest

from pagedd.engine.engine import Engine
from pagedd.engine.picture import block_info, shown
from pagedd.engine.request import Preemption, Request
from pagedd.engine.sampling_params import SamplingParams


@pytest.fixture
def engine_of():
    return lambda b: Engine(b.runner, b.scheduler, clock=lambda: b.now)


def test_fills_say_how_many_slots_of_each_block_hold_a_token(bench, engine_of) -> None:
    b = bench(num_blocks=6)
    b.add("a", [1, 2, 3, 4, 5, 6], max_tokens=4)
    b.step()
    snapshot = engine_of(b).snapshot()
    assert snapshot.block_states == bytes([2, 2, 0, 0, 0, 0])
    assert snapshot.block_fills == bytes([4, 2, 0, 0, 0, 0])
    b.run()
    assert engine_of(b).snapshot().block_fills == bytes([4, 4, 0, 0, 0, 0])  # cached now, and full
    assert engine_of(b).snapshot().block_states == bytes([1, 1, 0, 0, 0, 0])


def test_fills_of_used_blocks_add_up_to_the_live_tokens_whatever_is_shared(bench, engine_of) -> None:
    b = bench(num_blocks=40, max_num_batched_tokens=9)
    b.add("forked", [1, 2, 3, 4, 5, 6], max_tokens=9, n=3)
    b.add("long", [7] * 21, max_tokens=6)
    b.add("other", [1, 2, 3, 4, 8], max_tokens=7)
    engine = engine_of(b)
    while b.scheduler.has_work:
        b.step()
        snapshot = engine.snapshot()
        used = [fill for fill, state in zip(snapshot.block_fills, snapshot.block_states, strict=True) if state == 2]
        assert sum(used) == snapshot.stats.num_live_tokens
        assert all(used)


def test_a_sequence_says_what_the_last_step_computed_for_it(bench, engine_of) -> None:
    b = bench(num_blocks=20, max_num_batched_tokens=6)
    engine = engine_of(b)
    for request_id, prompt in (("short", [1, 2]), ("long", [3] * 10)):
        engine.add(Request(request_id=request_id, prompt_token_ids=prompt, params=SamplingParams(max_tokens=5)))
    engine.step()
    assert [s.num_scheduled_tokens for s in engine.snapshot().sequences] == [2, 4]
    engine.step()
    rows = engine.snapshot().sequences
    assert [(s.state, s.num_scheduled_tokens, s.max_tokens) for s in rows] == [("decode", 1, 5), ("prefill", 5, 5)]


def test_a_picture_leaves_out_those_that_came_last_and_wait(bench) -> None:
    b = bench(num_blocks=20, max_num_seqs=1)
    for i in range(3):
        b.add(f"waits{i}", [1, 2])
    b.add("urgent", [1, 2], priority=50)
    b.step()
    names = [sequence.request.request_id for sequence in shown(b.scheduler.live_sequences(), 3)]
    assert names == ["waits0", "waits1", "urgent"]
    assert len(shown(b.scheduler.live_sequences(), 4)) == 4


def test_a_shared_block_names_all_its_owners_and_what_it_holds(bench) -> None:
    b = bench(num_blocks=8)
    for request_id in ("a", "b"):
        b.add(request_id, [1, 2, 3, 4, 5], max_tokens=3, extras=(("caller", "uid:7"),))
        b.step()
    info = block_info(b.blocks, b.scheduler.live_sequences(), 0)
    assert info.owners == [("a", 0, 0), ("b", 0, 0)]
    assert (info.state, info.ref_count, info.num_hits, info.last_use_s) == ("used", 2, 1, 0.0)
    assert info.token_ids == [1, 2, 3, 4]
    assert info.extras == (("caller", "uid:7"),)
    assert info.digest is not None


def test_an_open_tail_holds_what_is_computed_and_no_digest(bench) -> None:
    b = bench(num_blocks=8)
    b.add("a", [1, 2, 3, 4, 5], max_tokens=5)
    b.step()
    info = block_info(b.blocks, b.scheduler.live_sequences(), 1)
    assert (info.owners, info.token_ids, info.digest) == ([("a", 0, 1)], [5], None)


def test_cached_and_free_blocks_have_no_owner(bench) -> None:
    b = bench(num_blocks=4)
    b.add("a", [1, 2, 3, 4, 5], max_tokens=1)
    b.run()
    b.now = 3.0
    cached, free = (block_info(b.blocks, (), index) for index in (0, 3))
    assert (cached.state, cached.owners, cached.token_ids, cached.last_use_s) == ("cached", [], [1, 2, 3, 4], 3.0)
    assert (free.state, free.token_ids, free.last_use_s) == ("free", [], None)


def test_beyond_the_pool_there_is_no_block_and_no_prefix_of_an_unknown_digest(bench, engine_of) -> None:
    engine = engine_of(bench(num_blocks=4))
    assert (engine.block(4), engine.block(-1)) == (None, None)
    assert engine.evict_prefix(b"unknown") is None


def test_a_step_says_who_lost_what_to_whom(bench) -> None:
    b = bench(num_blocks=20, max_num_seqs=1)
    b.add("low", [1, 2], max_tokens=9)
    b.step()
    assert b.scheduler.preemptions == []
    b.add("urgent", [3, 4], priority=50)
    b.step()
    assert b.scheduler.preemptions == [
        Preemption(request_id="low", choice_index=0, by_request_id="urgent", for_what="seat")
    ]
    b.step()
    assert b.scheduler.preemptions == []


def test_a_sequence_that_grows_takes_blocks_and_is_named(bench) -> None:
    b = bench(num_blocks=4, max_num_seqs=2, enable_prefix_caching=False)
    b.add("first", [1] * 7, max_tokens=8)
    b.step()
    b.add("second", [2] * 4, max_tokens=8)
    seen = []
    while b.scheduler.has_work:
        b.step()
        seen += b.scheduler.preemptions
    assert Preemption(request_id="second", choice_index=0, by_request_id="first", for_what="blocks") in seen
