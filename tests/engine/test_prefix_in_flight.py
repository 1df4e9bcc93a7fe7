"""Prompts that begin like one that is being computed: computed once, however they arrive."""

import pytest

from .conftest import cold_output


@pytest.fixture
def bench(bench_before_tiers):
    """What stands behind the pool changes nothing here."""
    return bench_before_tiers


SHARED = [i % 47 for i in range(64)]


def prompts(count: int) -> dict[str, list[int]]:
    return {str(i): [*SHARED, 40 + i % 5, i % 9, i % 7] for i in range(count)}


def same_as_cold(b, asked: dict[str, list[int]], max_tokens: int = 4) -> bool:
    return {name: b.output(name) for name in asked} == {name: cold_output(p, max_tokens) for name, p in asked.items()}


@pytest.mark.parametrize("num_before", [0, 1, 2, 3, 5, 20])
def test_a_shared_prefix_is_computed_once_whenever_the_others_arrive(bench, num_before) -> None:
    b = bench(num_blocks=200, max_num_seqs=32, max_num_batched_tokens=16, max_model_len=100)
    asked = prompts(32)
    first, *others = asked
    b.add(first, asked[first])
    for _ in range(num_before):
        b.step()
    for name in others:
        b.add(name, asked[name])
    b.run()
    assert same_as_cold(b, asked)
    # Of each its own 3 prompt tokens and 3 of 4 outputs; the 16th block is full without them.
    assert b.runner.num_computed == len(SHARED) + 32 * (3 + 3)


def test_thousands_that_begin_alike_may_arrive_at_once(bench) -> None:
    b = bench(num_blocks=200, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=100)
    for i in range(5000):
        b.add(str(i), [*SHARED, i % 47], max_tokens=1)
    b.step()
    assert b.scheduler.num_waiting == 4999


def test_who_waits_holds_no_seat_and_lets_others_pass(bench) -> None:
    b = bench(num_blocks=60, max_num_seqs=2, max_num_batched_tokens=80, max_model_len=100)
    asked = prompts(3) | {"other": [1, 2, 3]}
    for name, prompt in asked.items():
        b.add(name, prompt)
    b.step()
    assert [s.request.request_id for s in b.scheduler.running] == ["0", "other"]
    assert b.scheduler.num_waiting == 2
    assert (b.engine.stats().num_requests_waiting, b.engine.stats().num_requests_awaiting_prefix) == (2, 2)
    b.run()
    assert b.engine.stats().num_requests_awaiting_prefix == 0
    assert same_as_cold(b, asked)


def test_an_urgent_request_lends_its_urgency_to_who_computes_its_prefix(bench) -> None:
    b = bench(num_blocks=60, max_num_seqs=4, max_num_batched_tokens=8, max_model_len=100)
    asked = prompts(2)
    b.add("low", asked["0"], priority=-50)
    b.step()
    b.add("middle", [7] * 60, priority=0)
    b.add("high", asked["1"], priority=50)
    while ("high", 0) not in b.finished:
        b.step()
    assert ("middle", 0) not in b.finished
    assert b.num_cached("high") == len(SHARED)


def test_urgency_that_changes_while_it_waits_is_lent_as_it_is(bench) -> None:
    b = bench(num_blocks=60, max_num_seqs=6, max_num_batched_tokens=8, max_model_len=100)
    b.add("low", [*SHARED, 1, 2], priority=-50)
    b.step()
    (low,) = b.scheduler.running
    b.add("high", [*SHARED, 3], priority=-40)
    b.step()
    assert low.priority == -40
    b.scheduler.set_priority("high", 100)
    assert low.priority == 100
    b.scheduler.set_priority("high", -60)
    assert low.priority == -50
    b.scheduler.set_priority("high", 100)
    b.scheduler.abort("high")
    b.step()
    assert low.priority == -50


def test_lent_urgency_is_given_back(bench) -> None:
    b = bench(num_blocks=60, max_num_seqs=4, max_num_batched_tokens=8, max_model_len=100)
    b.add("low", [*SHARED, 1, 2], max_tokens=20, priority=-50)
    b.step()
    (low,) = b.scheduler.running
    own = low.priority, low.due_s
    b.add("high", [*SHARED, 3], priority=50)
    b.step()
    assert low.priority == 50
    b.scheduler.set_priority("low", 80)
    assert low.priority == 80
    b.scheduler.set_priority("low", -60)
    assert low.priority == 50
    while ("high", 0) not in b.finished:
        b.step()
    assert low.priority == -60
    assert low.due_s > own[1]


@pytest.mark.parametrize("num_steps", [1, 3, 6])
def test_when_the_one_that_computes_goes_another_takes_its_place(bench, num_steps) -> None:
    b = bench(num_blocks=200, max_num_seqs=8, max_num_batched_tokens=8, max_model_len=100)
    asked = prompts(4)
    for name, prompt in asked.items():
        b.add(name, prompt)
    for _ in range(num_steps):
        b.step()
    b.scheduler.abort("0")
    b.run()
    del asked["0"]
    assert same_as_cold(b, asked)
    assert b.runner.num_computed == len(SHARED) + 3 * 6


def test_one_that_waits_can_be_aborted(bench) -> None:
    b = bench(num_blocks=60, max_num_seqs=4, max_num_batched_tokens=8, max_model_len=100)
    for name, prompt in prompts(3).items():
        b.add(name, prompt)
    b.step()
    assert b.scheduler.abort("1")
    assert b.scheduler.num_waiting == 1
    b.run()
    assert set(b.finished) == {("0", 0), ("2", 0)}


def test_nobody_waits_for_a_stranger_or_without_a_cache(bench) -> None:
    apart = bench(num_blocks=60, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=100)
    apart.add("a", [*SHARED, 1], extras=(("caller", "1"),))
    apart.add("b", [*SHARED, 2], extras=(("caller", "2"),))
    for _ in range(4):
        apart.step()
    assert apart.scheduler.num_running == 2
    off = bench(
        num_blocks=60, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=100, enable_prefix_caching=False
    )
    off.add("a", [*SHARED, 1])
    off.add("b", [*SHARED, 2])
    off.run()
    assert off.runner.num_computed == 2 * (len(SHARED) + 1 + 3)


def test_an_index_that_confuses_everything_only_costs_time(bench) -> None:
    b = bench(num_blocks=80, max_num_seqs=8, max_num_batched_tokens=8, max_model_len=100, hasher=lambda data: b"\0")
    asked = {str(i): [(i * j) % 11 for j in range(1, 30)] for i in range(8)}
    for name, prompt in asked.items():
        b.add(name, prompt)
    b.run()
    assert same_as_cold(b, asked)
