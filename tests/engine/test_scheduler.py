"""Scheduler and blocks on an arithmetic model: block size 4, few blocks, exact ids."""

import pytest

from pagedd.engine.errors import EngineError


@pytest.fixture
def bench(bench_before_tiers):
    """What stands behind the pool changes nothing here."""
    return bench_before_tiers


def shape(step):
    """(request, start, tokens) of each scheduled sequence."""
    return [(i.sequence.request.request_id, i.start, i.num_scheduled_tokens) for i in step.scheduled]


def test_a_request_runs_from_prefill_to_its_length(bench, cold) -> None:
    b = bench()
    b.add("a", [1, 2, 3, 4, 5], max_tokens=3)
    assert shape(b.step()) == [("a", 0, 5)]
    assert shape(b.step()) == [("a", 5, 1)]
    b.run()
    assert b.output("a") == cold([1, 2, 3, 4, 5], 3)
    assert b.finished["a", 0].finish_reason == "length"


def test_a_stop_token_ends_the_sequence_and_is_included(bench, cold) -> None:
    expected = cold([1, 2, 3], 6)
    b = bench()
    b.add("a", [1, 2, 3], max_tokens=6, stop_token_ids=(expected[2],))
    b.run()
    cut = expected.index(expected[2]) + 1
    assert b.output("a") == expected[:cut]
    assert b.finished["a", 0].finish_reason == "stop"
    assert b.finished["a", 0].stop_token_id == expected[2]


def test_decodes_come_first_and_prefill_gets_what_is_left_of_the_budget(bench) -> None:
    b = bench(num_blocks=20, max_num_batched_tokens=8)
    b.add("a", [1] * 4, max_tokens=8)
    b.step()
    b.add("b", [2] * 20, max_tokens=2)
    assert shape(b.step()) == [("a", 4, 1), ("b", 0, 7)]
    assert shape(b.step()) == [("a", 5, 1), ("b", 7, 7)]
    assert shape(b.step()) == [("a", 6, 1), ("b", 14, 6)]


class TestLongPrompts:
    def test_a_short_prompt_behind_a_long_one_shares_its_budget(self, bench) -> None:
        b = bench(num_blocks=40, max_num_batched_tokens=16, max_model_len=150)
        b.add("long", [1] * 100, max_tokens=2)
        assert shape(b.step()) == [("long", 0, 16)]
        b.add("short", [2] * 12, max_tokens=2)
        assert shape(b.step()) == [("long", 16, 8), ("short", 0, 8)]
        assert shape(b.step()) == [("short", 8, 4), ("long", 24, 12)]
        assert ("short", 0) in b.tokens

    def test_what_the_short_one_cannot_use_goes_back_to_the_long_one(self, bench) -> None:
        b = bench(num_blocks=40, max_num_batched_tokens=16, max_model_len=150, max_num_seqs=1)
        b.add("long", [1] * 100, max_tokens=2)
        b.step()
        b.add("short", [2] * 12, max_tokens=2)
        assert shape(b.step()) == [("long", 16, 16)]  # there is no seat

    def test_prompts_of_equal_length_are_computed_one_after_the_other(self, bench) -> None:
        b = bench(num_blocks=40, max_num_batched_tokens=16, max_model_len=150)
        b.add("a", [1] * 40, max_tokens=2)
        b.add("b", [2] * 40, max_tokens=2)
        assert shape(b.step()) == [("a", 0, 16)]
        assert shape(b.step()) == [("a", 16, 16)]

    def test_a_decoding_sequence_waits_for_at_most_a_budget_of_prompt_tokens(self, bench) -> None:
        """A decodes, B is long, C comes later: A draws in every step, C's first token takes a few chunks."""
        b = bench(num_blocks=400, block_size=16, max_num_batched_tokens=64, max_model_len=6000)
        b.add("A", [1, 2, 3], max_tokens=200)
        b.step()
        b.add("B", [4] * 4000, max_tokens=2)
        for _ in range(5):
            assert b.step().scheduled[0].sequence.request.request_id == "A"
        b.add("C", [5] * 100, max_tokens=2)
        steps = 0
        while ("C", 0) not in b.tokens:
            step = b.step()
            steps += 1
            assert step.num_scheduled_tokens <= 64
            assert step.scheduled[0].sequence.request.request_id == "A"
        assert steps <= 4


def test_requests_join_and_leave_the_batch_at_every_step(bench) -> None:
    b = bench(num_blocks=12)
    b.add("a", [1, 2], max_tokens=2)
    b.step()
    b.add("b", [3, 4], max_tokens=3)
    assert shape(b.step()) == [("a", 2, 1), ("b", 0, 2)]
    assert shape(b.step()) == [("b", 2, 1)]


def test_a_full_batch_does_not_look_up_the_prefix_of_whom_it_cannot_seat(bench, monkeypatch) -> None:
    b = bench(max_num_seqs=1)
    b.add("a", [1], max_tokens=4)
    b.add("b", [2])
    looked_up = []
    find_prefix = b.blocks.find_prefix
    monkeypatch.setattr(b.blocks, "find_prefix", lambda s: looked_up.append(s.request.request_id) or find_prefix(s))
    b.run()
    assert looked_up == ["a", "b"]


def test_seats_bound_the_batch_and_the_next_enters_when_one_leaves(bench) -> None:
    b = bench(num_blocks=12, max_num_seqs=2)
    for name in "abc":
        b.add(name, [ord(name) % 50, 2, 3], max_tokens=2)
    assert [name for name, _, _ in shape(b.step())] == ["a", "b"]
    b.step()
    assert [name for name, _, _ in shape(b.step())] == ["c"]


class TestPriority:
    def test_higher_is_more_urgent_and_equals_are_served_in_order_of_arrival(self, bench) -> None:
        b = bench(num_blocks=12, max_num_seqs=1)
        for name, priority in (("low", -5), ("mid", 0), ("high", 5), ("high2", 5)):
            b.add(name, [1, 2, 3], max_tokens=1, priority=priority)
        order = [b.step().scheduled[0].sequence.request.request_id for _ in range(4)]
        assert order == ["high", "high2", "mid", "low"]

    def test_fcfs_ignores_priorities(self, bench) -> None:
        b = bench(num_blocks=12, max_num_seqs=1, scheduling_policy="fcfs")
        b.add("low", [1, 2, 3], max_tokens=1, priority=-5)
        b.add("high", [1, 2, 3], max_tokens=1, priority=5)
        assert b.step().scheduled[0].sequence.request.request_id == "low"

    def test_an_urgent_arrival_takes_the_seat_of_a_less_urgent_one_which_loses_nothing(self, bench, cold) -> None:
        b = bench(num_blocks=12, max_num_seqs=1)
        b.add("low", [1, 2, 3, 4, 5], max_tokens=6)
        b.step(), b.step()
        b.add("urgent", [6, 7], max_tokens=2, priority=50)
        assert shape(b.step()) == [("urgent", 0, 2)]
        b.run()
        assert b.output("low") == cold([1, 2, 3, 4, 5], 6)
        assert b.output("urgent") == cold([6, 7], 2)
        assert b.scheduler.counters.preemptions == 1

    def test_an_urgent_arrival_takes_blocks_only_if_that_makes_room(self, bench) -> None:
        b = bench(num_blocks=6)
        b.add("keeper", [1] * 8, max_tokens=8, priority=60)
        b.add("low", [2] * 4, max_tokens=8)
        b.step()
        b.add("urgent", [3] * 20, max_tokens=1, priority=50)
        step = b.step()
        assert {name for name, _, _ in shape(step)} == {"keeper", "low"}
        assert b.scheduler.counters.preemptions == 0

    @pytest.mark.parametrize(("num_choices", "num_low"), [(2, 1), (1, 2)])
    def test_blocks_that_only_the_less_urgent_share_are_theirs_to_lose(self, bench, cold, num_choices, num_low) -> None:
        b = bench(num_blocks=8)
        for name in range(num_low):
            b.add(f"low{name}", [2] * 16 + [name], max_tokens=8, n=num_choices)
        b.step(), b.step()
        b.add("urgent", [3] * 20, max_tokens=2, priority=50)
        assert ("urgent", 0, 20) in shape(b.step())
        b.run()
        assert [b.output("low0", choice) for choice in range(num_choices)] == [
            cold([2] * 16 + [0], 8, choice) for choice in range(num_choices)
        ]

    def test_what_an_urgent_arrival_begins_with_itself_makes_no_room_for_it(self, bench) -> None:
        b = bench(num_blocks=8)
        b.add("keeper", [1] * 9, max_tokens=8, priority=60)
        b.add("low", [2] * 13, max_tokens=8)
        b.step(), b.step()
        b.add("urgent", [2] * 12 + [3] * 9, max_tokens=1, priority=50)
        b.step()
        assert b.scheduler.counters.preemptions == 0

    def test_a_changed_priority_moves_a_waiting_request(self, bench) -> None:
        b = bench(num_blocks=12, max_num_seqs=1)
        b.add("a", [1, 2], max_tokens=3)
        b.step()
        b.add("b", [3, 4], max_tokens=1)
        b.add("c", [5, 6], max_tokens=1)
        assert b.scheduler.set_priority("c", 100)
        assert not b.scheduler.set_priority("nobody", 1)
        assert shape(b.step())[0][0] == "c"

    @pytest.mark.parametrize("urgent_priority", [1, 10, 100])
    def test_a_low_request_starts_within_the_bound_under_endless_urgent_load(self, bench, urgent_priority) -> None:
        b = bench(num_blocks=64, max_num_seqs=4, max_num_batched_tokens=64, ageing_s_per_point=0.5)
        low_priority, step_s = -100, 0.1
        bound_s = (urgent_priority - low_priority) * 0.5
        # Four seats of 5 steps each serve 8 requests a second; 8.8 arrive.
        arrivals, started_s, num_urgent = 0.0, None, 0
        b.add("low", [1, 2, 3], max_tokens=5, priority=low_priority)
        while started_s is None and b.now < 20 * bound_s:
            arrivals += 8.8 * step_s
            while num_urgent < arrivals:
                b.add(f"u{num_urgent}", [4, 5, 6], max_tokens=5, priority=urgent_priority)
                num_urgent += 1
            if any(name == "low" for name, _, _ in shape(b.step())):
                started_s = b.now
            b.now += step_s
        # What arrived before the bound is still ahead of it: at 110 % of capacity that takes a tenth longer.
        assert started_s is not None
        assert started_s <= 1.1 * bound_s + 2.0


class TestDoor:
    def test_a_prompt_that_could_never_fit_is_refused_with_numbers_and_the_next_one_is_served(
        self, bench, cold
    ) -> None:
        b = bench(num_blocks=50, block_size=16, max_model_len=2048, max_num_batched_tokens=256)
        with pytest.raises(
            EngineError, match=r"exceeds_kv_pool: 1002 prompt tokens .* 63 blocks of 16, the pool has 50"
        ):
            b.add("big", [1] * 1002, max_tokens=1)
        with pytest.raises(EngineError, match=r"exceeds_kv_pool: 500 prompt tokens \+ max_tokens 1000"):
            b.add("long", [1] * 500, max_tokens=1000)
        b.add("hi", [7], max_tokens=2)
        b.run()
        assert b.output("hi") == cold([7], 2)

    def test_context_empty_and_duplicate_are_refused_by_name(self, bench) -> None:
        b = bench(max_model_len=16)
        with pytest.raises(EngineError, match="prompt_too_long: 10 prompt tokens \\+ max_tokens 7 = 17, context 16"):
            b.add("a", [1] * 10, max_tokens=7)
        with pytest.raises(EngineError, match="empty_prompt"):
            b.add("a", [])
        b.add("a", [1], max_tokens=1)
        with pytest.raises(EngineError, match="duplicate_request"):
            b.add("a", [1], max_tokens=1)

    def test_a_request_of_exactly_the_pool_is_served(self, bench, cold) -> None:
        b = bench(num_blocks=3)
        b.add("a", [1, 2, 3, 4, 5], max_tokens=8)  # 12 slots: the last drawn token needs none
        b.run()
        assert b.output("a") == cold([1, 2, 3, 4, 5], 8)


class TestPrefixCaching:
    @pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33])
    def test_the_same_prompt_twice_answers_as_cold_and_leaves_a_token_to_compute(self, bench, cold, length) -> None:
        prompt = [i % 50 for i in range(length)]
        b = bench(num_blocks=12, block_size=16)
        b.add("first", prompt)
        b.run()
        b.add("second", prompt)
        b.run()
        assert b.output("first") == b.output("second") == cold(prompt, 4)
        assert b.num_cached("first") == 0
        assert b.num_cached("second") == (length - 1) // 16 * 16

    @pytest.mark.parametrize("max_tokens", [1, 2])
    def test_a_block_is_indexed_under_the_tokens_it_really_holds(self, bench, cold, max_tokens) -> None:
        prompt = list(range(15))
        b = bench(num_blocks=40, block_size=16)
        b.add("a", prompt, max_tokens=max_tokens)
        b.run()
        drawn = cold(prompt, 1)[0]
        same, other = [*prompt, drawn, 7, 8, 9], [*prompt, (drawn + 1) % 50, 7, 8, 9]
        b.add("other", other)
        b.add("same", same)
        b.run()
        assert b.output("other") == cold(other, 4)
        assert b.output("same") == cold(same, 4)
        assert b.num_cached("other") == 0
        # The last drawn token's KV is never written: with one token the block never fills.
        assert b.num_cached("same") == (16 if max_tokens == 2 else 0)

    def test_a_second_request_uses_only_finished_blocks_of_one_that_is_aborted_in_prefill(self, bench, cold) -> None:
        prompt = [i % 50 for i in range(64)]
        b = bench(num_blocks=40, max_num_batched_tokens=8, max_model_len=128)
        b.add("first", prompt)
        b.step(), b.step(), b.step()
        b.add("second", prompt)
        b.step()
        assert b.scheduler.abort("first")
        b.run()
        assert b.output("second") == cold(prompt, 4)
        assert ("first", 0) not in b.finished

    def test_the_tail_is_evicted_first_and_a_hit_is_an_unbroken_run(self, bench, cold) -> None:
        prompt = list(range(16))
        b = bench(num_blocks=6, host_slots=0)
        b.add("a", prompt, max_tokens=1)
        b.run()
        assert b.blocks.pool.num_cached == 4
        b.add("filler", [40] * 13, max_tokens=3)  # 4 blocks: two free ones, then the two least recently used
        b.run()
        assert b.blocks.evictions_total == 2
        b.add("again", prompt, max_tokens=1)
        b.run()
        assert b.num_cached("again") == 8
        assert b.output("again") == cold(prompt, 1)

    def test_colliding_digests_never_serve_another_prompt(self, bench, cold) -> None:
        b = bench(num_blocks=400, hasher=lambda data: bytes([sum(data) % 256]), max_num_seqs=4)
        for i in range(500):
            prompt = [i % 50, i // 50, 3, 4, 5, 6, 7, 8, i % 7, i % 11, i % 13, 1, 2]
            b.add(f"r{i}", prompt, max_tokens=2)
            if i % 5 == 4:
                b.run()
            assert b.output(f"r{i}") in ([], cold(prompt, 2))
        b.run()
        for i in range(500):
            prompt = [i % 50, i // 50, 3, 4, 5, 6, 7, 8, i % 7, i % 11, i % 13, 1, 2]
            assert b.output(f"r{i}") == cold(prompt, 2)

    def test_requests_of_different_extras_share_nothing(self, bench) -> None:
        prompt = list(range(12))
        b = bench(num_blocks=40)
        extras = [
            (("salt", "A"),),
            (("adapter", "A"),),
            (("uid", "1"),),
            (("uid", "2"),),
            (("uid", "1"), ("salt", "A")),
        ]
        for i, extra in enumerate([*extras, extras[0]]):
            b.add(f"r{i}", prompt, max_tokens=1, extras=extra)
            b.run()
        assert [b.num_cached(f"r{i}") for i in range(6)] == [0, 0, 0, 0, 0, 8]

    def test_off_means_nothing_is_kept(self, bench) -> None:
        b = bench(enable_prefix_caching=False)
        for name in ("a", "b"):
            b.add(name, list(range(12)), max_tokens=1)
            b.run()
            assert b.num_cached(name) == 0
            assert b.blocks.pool.num_cached == 0

    def test_the_hit_rate_counts_a_request_once(self, bench) -> None:
        b = bench(num_blocks=12)
        for name in ("a", "b"):
            b.add(name, list(range(10)), max_tokens=1)
            b.run()
        assert b.scheduler.counters.prefix_queries == 20
        assert b.scheduler.counters.prefix_hits == 8


class TestPreemption:
    def test_when_blocks_run_out_the_least_urgent_gives_way_and_all_answers_stay_the_same(self, bench, cold) -> None:
        b = bench(num_blocks=6)
        prompts = {name: [i, i + 1, i + 2, i + 3] for i, name in enumerate("abc")}
        for name, prompt in prompts.items():
            b.add(name, prompt, max_tokens=12)
        b.run()
        assert b.scheduler.counters.preemptions > 0
        for name, prompt in prompts.items():
            assert b.output(name) == cold(prompt, 12)

    def test_a_victim_resumes_before_those_that_never_started(self, bench) -> None:
        b = bench(num_blocks=6, max_num_seqs=2)
        for name, first in (("a", 1), ("b", 2), ("c", 3)):
            b.add(name, [first] * 6, max_tokens=12)
        order: list[str] = []
        while b.scheduler.has_work:
            for name, start, _ in shape(b.step()):
                if start == 0 or name not in order:
                    order.append(name)
        assert order.index("c") > max(i for i, name in enumerate(order) if name == "b")

    def test_a_step_never_holds_its_own_victim(self, bench) -> None:
        b = bench(num_blocks=8, max_num_batched_tokens=6)
        b.add("early", [1] * 20, max_tokens=4)
        b.step()
        b.add("late", [2] * 4, max_tokens=8)
        for _ in range(40):
            if not b.scheduler.has_work:
                break
            step = b.step()
            for item in step.scheduled:
                assert item.sequence.state.value in ("running", "finished")
        assert not b.scheduler.has_work

    def test_recomputed_tokens_are_counted_apart(self, bench) -> None:
        b = bench(num_blocks=12, max_num_seqs=1, enable_prefix_caching=False)
        b.add("low", [1, 2, 3, 4, 5], max_tokens=6)
        b.step(), b.step()
        b.add("urgent", [6, 7], max_tokens=1, priority=50)
        b.run()
        assert b.scheduler.counters.recomputed_tokens == 6
        assert b.scheduler.counters.prompt_tokens == 7
        assert b.scheduler.counters.generation_tokens == 7


class TestForks:
    def test_choices_share_the_prompt_and_copy_the_tail_before_they_write(self, bench, cold) -> None:
        b = bench(num_blocks=12)
        prompt = [1, 2, 3, 4, 5, 6]
        b.add("a", prompt, max_tokens=4, n=3)
        assert shape(b.step()) == [("a", 0, 6)]
        assert b.blocks.pool.num_used == 2
        b.step()
        assert b.runner.copied == [(1, 2), (1, 3)]
        assert b.blocks.pool.num_used == 4
        b.run()
        for choice in range(3):
            assert b.output("a", choice) == cold(prompt, 4, choice)
        assert b.runner.num_computed == 6 + 3 * 3

    def test_choices_without_a_seat_follow_later(self, bench, cold) -> None:
        b = bench(num_blocks=12, max_num_seqs=2)
        b.add("a", [1, 2, 3, 4, 5], max_tokens=3, n=5)
        b.run()
        for choice in range(5):
            assert b.output("a", choice) == cold([1, 2, 3, 4, 5], 3, choice)

    def test_one_token_choices_end_at_the_fork(self, bench, cold) -> None:
        b = bench()
        b.add("a", [1, 2, 3], max_tokens=1, n=4)
        b.run()
        assert [b.output("a", c) for c in range(4)] == [cold([1, 2, 3], 1, c) for c in range(4)]
        assert b.blocks.pool.num_used == 0

    def test_an_aborted_choice_leaves_the_others(self, bench, cold) -> None:
        b = bench(num_blocks=12)
        b.add("a", [1, 2, 3], max_tokens=5, n=3)
        b.step()
        assert b.scheduler.abort("a", 1)
        assert not b.scheduler.abort("a", 1)
        b.run()
        assert ("a", 1) not in b.finished
        assert b.output("a", 2) == cold([1, 2, 3], 5, 2)

    def test_the_first_choice_aborted_before_the_fork_hands_the_prompt_on(self, bench, cold) -> None:
        b = bench(num_blocks=12, max_num_batched_tokens=4)
        b.add("a", [1, 2, 3, 4, 5, 6], max_tokens=3, n=3)
        b.step()
        assert b.scheduler.abort("a", 0)
        b.run()
        assert sorted(b.finished) == [("a", 1), ("a", 2)]
        assert b.output("a", 1) == cold([1, 2, 3, 4, 5, 6], 3, 1)


@pytest.mark.parametrize("num_steps", range(7))
def test_an_abort_at_any_time_gives_all_blocks_back_at_once(bench, num_steps) -> None:
    b = bench(num_blocks=12, max_num_batched_tokens=3)
    b.add("a", [1, 2, 3, 4, 5, 6, 7], max_tokens=4, n=2)
    for _ in range(num_steps):
        b.step()
    b.scheduler.abort("a")
    assert b.blocks.pool.num_used == 0
    assert not b.scheduler.has_work
    assert not b.scheduler.abort("a")
    b.scheduler.check_integrity()


@pytest.mark.parametrize("num_free_seats", [0, 4])
def test_an_urgent_arrival_gets_a_token_of_a_budget_that_decodes_would_spend(bench, num_free_seats) -> None:
    b = bench(num_blocks=200, max_num_seqs=4 + num_free_seats, max_num_batched_tokens=4, max_model_len=256)
    for name in "abcd":
        b.add(name, [1, 2, 3], max_tokens=100)
    while sum(s.is_decoding for s in b.scheduler.running) < 4:
        b.step()
    b.add("urgent", [4, 5, 6, 7], max_tokens=1, priority=100)
    num_steps = 0
    while ("urgent", 0) not in b.finished:
        b.step()
        num_steps += 1
    assert num_steps < 10


def test_where_those_whose_turn_it_is_find_no_block_the_most_urgent_goes_on(bench, cold) -> None:
    b = bench(num_blocks=3)
    b.add("a", [1, 2, 3], max_tokens=6)
    b.add("b", [4, 5, 6], max_tokens=6)
    assert shape(b.step()) == [("a", 0, 3), ("b", 0, 3)]
    b.scheduler.budget.num_decodes = 1  # as after memory ran out
    turns = [shape(b.step()) for _ in range(4)]
    assert turns == [[("a", 3, 1)], [("b", 3, 1)], [("a", 4, 1)], [("a", 5, 1)]]
    b.run()
    assert (b.output("a"), b.output("b")) == (cold([1, 2, 3], 6), cold([4, 5, 6], 6))
