"""Random lives on a small pool: whatever happens, blocks add up and every answer is the one a cold engine gives."""

import random
from collections import Counter
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)


@pytest.fixture(autouse=True)
def helpers(bench, cold):
    EngineLife.make_bench, EngineLife.cold = staticmethod(bench), staticmethod(cold)


class EngineLife(RuleBasedStateMachine):
    """Arrivals, forks, steps, aborts and urgency in any order. Prompts share prefixes, so that hits happen."""

    make_bench = cold = None
    happened: ClassVar[Counter[str]] = Counter()

    @initialize(
        num_blocks=st.integers(6, 24),
        block_size=st.sampled_from([2, 4, 8]),
        seats=st.integers(1, 6),
        budget=st.integers(1, 24),
        caching=st.booleans(),
        weak_digest=st.booleans(),
        guesses=st.sampled_from([0, 1, 3, 7]),
    )
    def start(self, num_blocks, block_size, seats, budget, caching, weak_digest, guesses) -> None:
        settings = {"hasher": lambda data: bytes([sum(data) % 256])} if weak_digest else {}
        self.bench = self.make_bench(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=seats,
            max_num_batched_tokens=budget,
            max_model_len=num_blocks * block_size,
            enable_prefix_caching=caching,
            num_speculative_tokens=guesses,
            **settings,
        )
        self.requests: dict[str, tuple[list[int], int, int]] = {}
        self.aborted: set[str] = set()
        self.capacity = num_blocks * block_size

    @rule(
        family=st.integers(0, 2),
        length=st.integers(1, 40),
        tail=st.integers(0, 3),
        max_tokens=st.integers(1, 20),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        priority=st.sampled_from([-100, -1, 0, 0, 0, 1, 100]),
    )
    def arrive(self, family, length, tail, max_tokens, n, priority) -> None:
        self.happened["arrive"] += 1
        length = min(length, self.capacity - max_tokens)
        if length < 1:
            return
        prompt = [(family * 7 + i) % 50 for i in range(length - 1)] + [tail]
        name = f"r{len(self.requests)}"
        self.requests[name] = (prompt, max_tokens, n)
        self.bench.add(name, prompt, max_tokens=max_tokens, n=n, priority=priority)

    @precondition(lambda self: self.bench.scheduler.has_work)
    @rule(steps=st.integers(1, 6))
    def advance(self, steps) -> None:
        self.happened["advance"] += 1
        for _ in range(steps):
            if self.bench.scheduler.has_work:
                assert self.bench.step().scheduled, "a step in which nothing advances"
                self.bench.now += 0.1

    @precondition(lambda self: self.bench.scheduler.has_work)
    @rule(pick=st.randoms(use_true_random=False), one_choice=st.booleans())
    def abort(self, pick: random.Random, one_choice) -> None:
        self.happened["abort"] += 1
        victim = pick.choice(list(self.bench.scheduler.live_sequences()))
        name = victim.request.request_id
        assert self.bench.scheduler.abort(name, victim.choice_index if one_choice else None)
        self.aborted.add(name)

    @precondition(lambda self: self.bench.scheduler.has_work)
    @rule(pick=st.randoms(use_true_random=False), priority=st.integers(-100, 100))
    def change_priority(self, pick: random.Random, priority) -> None:
        self.happened["change_priority"] += 1
        sequence = pick.choice(list(self.bench.scheduler.live_sequences()))
        assert self.bench.scheduler.set_priority(sequence.request.request_id, priority)

    @invariant()
    def blocks_add_up(self) -> None:
        if hasattr(self, "bench"):
            self.bench.scheduler.check_integrity()
            pool = self.bench.blocks.pool
            assert pool.num_free + pool.num_cached + pool.num_used == pool.num_blocks
            running = [s for s in self.bench.scheduler.live_sequences() if s.block_table]
            assert len(running) <= self.bench.scheduler.config.max_num_seqs
            exact: dict[int, int] = {}
            for s in running:
                for logical, block_id in enumerate(s.block_table):
                    filled = min(pool_size := self.bench.blocks.block_size, s.num_computed_tokens - logical * pool_size)
                    exact[block_id] = max(exact.get(block_id, 0), filled)
            assert self.bench.blocks.num_live_tokens(running) == sum(exact.values())

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        self.bench.run()
        counters = self.bench.scheduler.counters
        self.happened["preempt"] += counters.preemptions
        self.happened["evict"] += self.bench.blocks.evictions_total
        self.happened["hit"] += counters.prefix_hits
        self.happened["fork"] += sum(n > 1 for _, _, n in self.requests.values())
        self.happened["accept"] += counters.accepted_tokens
        self.happened["reject"] += counters.drafted_tokens - counters.accepted_tokens
        self.happened["step"] += counters.steps
        pool = self.bench.blocks.pool
        assert pool.num_used == 0
        self.bench.runner.open_pages.settle()
        assert self.bench.runner.open_pages.num_used == 0
        assert set(pool.ref_counts()) <= {0}
        for name, (prompt, max_tokens, n) in self.requests.items():
            for choice in range(n):
                expected = self.cold(prompt, max_tokens, choice)
                if name in self.aborted:
                    assert self.bench.output(name, choice) == expected[: len(self.bench.output(name, choice))]
                else:
                    assert self.bench.output(name, choice) == expected


def test_whatever_happens_blocks_add_up_and_every_answer_is_that_of_a_cold_engine() -> None:
    """Enough lives for well over 10 000 operations, each followed by the whole integrity check."""
    lives = settings(max_examples=400, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck))
    EngineLife.happened.clear()
    run_state_machine_as_test(EngineLife, settings=lives)
    happened = EngineLife.happened
    assert sum(happened[kind] for kind in ("arrive", "advance", "abort", "change_priority", "step")) >= 10_000
    assert all(happened[kind] > 100 for kind in ("abort", "preempt", "evict", "hit", "fork", "accept", "reject"))
