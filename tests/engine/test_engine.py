"""The step loop and containment: a fault in a batch costs the request that causes it."""

import logging
import random

import pytest

from pagedd.engine.engine import MAX_BARREN_STEPS, Engine
from pagedd.engine.errors import DeviceLostError, EngineError
from pagedd.engine.request import Request
from pagedd.engine.sampling_params import SamplingParams
from pagedd.engine.step import Runner, Sampled


class FaultyRunner(Runner):
    """Passes steps on unless one of `culprits` is in them; `nan` requests draw no token."""

    def __init__(self, runner) -> None:
        self.runner = runner
        self.seconds = runner.seconds
        self.culprits: dict[str, Exception] = {}
        self.nan: set[str] = set()
        self.faults_after: list[Exception] = []  # raised once each, when the whole step has been computed

    def run(self, step):
        if self.faults_after:
            self.runner.run(step)
            raise self.faults_after.pop()
        for item in step.scheduled:
            if (fault := self.culprits.get(item.sequence.request.request_id)) is not None:
                raise fault
        samplers = [s for item in step.scheduled for s in item.samplers]
        return [
            Sampled(0, error_code="nan_logits") if sampler.request.request_id in self.nan else draw
            for sampler, draw in zip(samplers, self.runner.run(step), strict=True)
        ]


@pytest.fixture
def life(bench):
    b = bench(num_blocks=20)
    runner = FaultyRunner(b.runner)
    return Engine(runner, b.scheduler, clock=lambda: b.now), runner, b


def request(name: str, prompt: list[int], max_tokens: int = 4, **params) -> Request:
    return Request(request_id=name, prompt_token_ids=prompt, params=SamplingParams(max_tokens=max_tokens, **params))


def drain(engine: Engine) -> dict[str, list]:
    outputs: dict[str, list] = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.check_integrity()
    return outputs


def tokens(outputs: list) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (RuntimeError("kernel"), "internal"),
        (MemoryError(), "out_of_memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out_of_memory"),
        (EngineError("nan_logits", "no"), "nan_logits"),
    ],
)
def test_only_the_request_that_breaks_the_batch_fails(life, cold, fault, code) -> None:
    engine, runner, _ = life
    for name, prompt in (("a", [1, 2]), ("bad", [3, 4]), ("c", [5, 6, 7, 8, 9])):
        engine.add(request(name, prompt))
    engine.step()
    runner.culprits["bad"] = fault
    outputs = drain(engine)
    assert outputs["bad"][-1].finish_reason == "error"
    assert outputs["bad"][-1].error_code == code
    assert len([o for o in outputs["bad"] if o.finish_reason]) == 1
    assert tokens(outputs["a"])[-3:] == cold([1, 2], 4)[1:]
    assert tokens(outputs["c"])[-3:] == cold([5, 6, 7, 8, 9], 4)[1:]
    assert engine.stats().num_blocks_used == 0


@pytest.mark.parametrize("has_computed", [False, True], ids=["before it copied", "after it wrote"])
def test_the_choices_of_a_request_survive_the_fault_of_a_batch_that_copies_their_shared_tail(
    life, cold, has_computed
) -> None:
    engine, runner, _ = life
    engine.add(request("a", [1, 2, 3, 4, 5], n=3))
    engine.add(request("bad", [6, 7]))
    first = engine.step()
    if has_computed:
        runner.faults_after.append(RuntimeError("kernel"))
    else:
        runner.culprits["bad"] = RuntimeError("kernel")
    outputs = [*first, *(output for group in drain(engine).values() for output in group)]
    for choice in range(3):
        mine = [o for o in outputs if o.request_id == "a" and o.choice_index == choice]
        assert tokens(mine) == cold([1, 2, 3, 4, 5], 4, choice)


def test_a_request_whose_logits_are_not_finite_fails_alone(life, cold) -> None:
    engine, runner, _ = life
    runner.nan.add("bad")
    engine.add(request("bad", [1, 2, 3], n=2))
    engine.add(request("good", [1, 2, 3]))
    outputs = drain(engine)
    assert [(o.choice_index, o.error_code) for o in outputs["bad"]] == [(0, "nan_logits"), (1, "nan_logits")]
    assert tokens(outputs["good"]) == cold([1, 2, 3], 4)


def test_a_device_that_computes_nothing_any_more_is_given_up(life) -> None:
    engine, runner, _ = life
    for i in range(MAX_BARREN_STEPS):
        runner.culprits[f"r{i}"] = RuntimeError("device lost")
        engine.add(request(f"r{i}", [1]))
        if i < MAX_BARREN_STEPS - 1:
            engine.step()
    with pytest.raises(RuntimeError, match="device lost"):
        engine.step()


class TightRunner(Runner):
    """Has memory for so many tokens at once."""

    def __init__(self, runner: Runner, num_tokens: int) -> None:
        super().__init__()
        self.runner = runner
        self.num_tokens = num_tokens
        self.sizes: list[int] = []

    def run(self, step):
        self.sizes.append(step.num_scheduled_tokens)
        if step.num_scheduled_tokens > self.num_tokens:
            raise MemoryError
        return self.runner.run(step)


def test_a_chunk_too_large_for_the_memory_is_computed_in_halves_and_later_ones_are_smaller(bench, cold) -> None:
    b = bench(num_blocks=200, max_num_batched_tokens=600, max_model_len=700)
    runner = TightRunner(b.runner, 200)
    engine = Engine(runner, b.scheduler)
    prompts = {"long": [i % 9 for i in range(600)], "short": [7, 8]}
    for name, prompt in prompts.items():
        engine.add(request(name, prompt))
    outputs = drain(engine)
    assert {name: tokens(outputs[name]) for name in prompts} == {name: cold(p, 4) for name, p in prompts.items()}
    assert (engine.stats().token_budget, engine.stats().max_num_batched_tokens) == (300, 600)
    engine.add(request("next", prompts["long"][::-1]))
    runner.sizes.clear()
    drain(engine)
    assert max(runner.sizes) <= 300


def test_a_shortage_of_memory_makes_chunks_smaller_and_nobody_who_decodes_stand_still(bench) -> None:
    b = bench(num_blocks=400, max_num_seqs=12, max_num_batched_tokens=24, max_model_len=100)
    runner = TightRunner(b.runner, 1000)
    engine = Engine(runner, b.scheduler)
    for i in range(11):
        engine.add(request(str(i), [i % 9, 1], max_tokens=60))
    for _ in range(3):
        engine.step()
    engine.add(request("chunk", [1, 2, 3, 4, 5], max_tokens=60))
    runner.num_tokens = 15
    engine.step()
    runner.num_tokens = 1000
    outputs = [output.request_id for _ in range(20) for output in engine.step()]
    assert {outputs.count(str(i)) for i in range(11)} == {20}


def test_decodes_that_are_too_many_for_the_memory_take_turns(bench, cold) -> None:
    b = bench(num_blocks=100, max_num_seqs=8)
    runner = TightRunner(b.runner, 1000)
    engine = Engine(runner, b.scheduler)
    prompts = {str(i): [i, 1] for i in range(8)}
    for name, prompt in prompts.items():
        engine.add(request(name, prompt, max_tokens=20))
    outputs: dict[str, list] = {}
    for output in engine.step():
        outputs.setdefault(output.request_id, []).append(output)
    runner.num_tokens = 4
    runner.sizes.clear()
    for name, more in drain(engine).items():
        outputs.setdefault(name, []).extend(more)
    assert {name: tokens(outputs[name]) for name in prompts} == {name: cold(p, 20) for name, p in prompts.items()}
    assert sum(size > 4 for size in runner.sizes) == 1, "tried once, and then fewer at a time"


def test_a_request_that_memory_cannot_hold_in_the_smallest_pieces_fails_alone(bench, cold) -> None:
    b = bench(num_blocks=40, max_num_batched_tokens=600, max_model_len=100)
    engine = Engine(TightRunner(b.runner, 4), b.scheduler)
    engine.add(request("long", list(range(40))))
    engine.add(request("short", [7, 8]))
    outputs = drain(engine)
    assert outputs["long"][-1].error_code == "out_of_memory"
    assert tokens(outputs["short"]) == cold([7, 8], 4)


def test_a_lost_device_is_given_up_at_once(life) -> None:
    engine, runner, _ = life

    def check_device() -> None:
        raise DeviceLostError("the GPU has fallen off the bus")

    runner.check_device = check_device
    runner.culprits["a"] = RuntimeError("CUDA error: unspecified launch failure")
    engine.add(request("a", [1]))
    engine.add(request("b", [2]))
    with pytest.raises(DeviceLostError):
        engine.step()


def test_snapshot_shows_every_block_and_every_block_table(life) -> None:
    engine, _, b = life
    engine.add(request("a", [1, 2, 3, 4, 5], n=2))
    b.now = 2.0
    engine.step()
    engine.step()
    picture = engine.snapshot()
    first, second = picture.sequences
    assert (first.state, first.block_table, second.block_table) == ("decode", [0, 2], [0, 1])
    assert picture.block_states == bytes([2, 2, 2] + [0] * 17)
    assert picture.block_ref_counts == bytes([2, 1, 1] + [0] * 17)
    assert (first.age_s, first.num_output_tokens, first.first_token_s) == (2.0, 2, 2.0)
    stats = picture.stats
    assert (stats.num_blocks_used, stats.num_live_tokens) == (3, 4 + 2 + 2)
    assert stats.slot_fill == 8 / 12
    assert stats.fragmentation == pytest.approx(1 / 3)
    assert stats.contiguous_fragmentation == 1 - 8 / 128
    assert set(stats.step_seconds) == {"schedule", "commit"}


def test_ratios_of_nothing_are_not_available(life) -> None:
    stats = life[0].stats()
    assert (stats.slot_fill, stats.fragmentation, stats.contiguous_fragmentation, stats.hit_rate) == (None,) * 4
    assert stats.kv_usage == 0.0


def test_drift_found_when_idle_is_an_alarm_and_drops_the_cache_not_the_engine(life, cold, caplog) -> None:
    engine, _, b = life
    engine.add(request("a", list(range(9))))
    drain(engine)
    b.blocks.pool.num_cached -= 1
    with caplog.at_level(logging.ERROR):
        engine.check_when_idle()
    assert "drifted" in caplog.text
    assert engine.stats().integrity_alarms_total == 1
    assert (engine.stats().num_blocks_free, engine.stats().num_blocks_cached) == (20, 0)
    engine.add(request("b", list(range(9))))
    assert tokens(drain(engine)["b"]) == cold(list(range(9)), 4)


def test_many_random_requests_with_aborts_and_preemptions_leave_nothing_behind(bench) -> None:
    """1200 requests, a fifth aborted at random stages, and arrivals urgent enough to preempt a tenth."""
    r = random.Random(5)
    b = bench(num_blocks=30, max_num_seqs=6, max_num_batched_tokens=24)
    engine = Engine(b.runner, b.scheduler, clock=lambda: b.now)
    pending = [f"r{i}" for i in range(1200)]
    live: set[str] = set()
    ended: set[str] = set()
    while pending or engine.has_work:
        while pending and len(live) < 12:
            name = pending.pop()
            prompt = [r.randrange(3)] * r.randint(1, 30)
            priority = 100 if r.random() < 0.4 else 0
            engine.add(
                Request(
                    request_id=name,
                    prompt_token_ids=prompt,
                    params=SamplingParams(max_tokens=r.randint(1, 12), n=r.choice([1, 1, 1, 2])),
                    priority=priority,
                )
            )
            live.add(name)
        for output in engine.step():
            if output.finish_reason and not any(
                s.request.request_id == output.request_id for s in b.scheduler.live_sequences()
            ):
                ended.add(output.request_id)
                live.discard(output.request_id)
        if live and r.random() < 0.12:
            victim = r.choice(sorted(live))
            assert engine.abort(victim)
            live.discard(victim)
            ended.add(victim)
        b.now += 0.01
    stats = engine.stats()
    assert len(ended) == 1200
    assert stats.preemptions_total >= 100
    assert stats.num_blocks_free + stats.num_blocks_cached == stats.num_blocks == 30
    assert set(b.blocks.pool.ref_counts()) == {0}
    engine.check_integrity()


def test_nobody_begins_with_what_a_request_with_broken_logits_computed(life, cold) -> None:
    engine, runner, b = life
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    runner.nan.add("bad")
    engine.add(request("bad", prompt))
    drain(engine)
    assert b.blocks.pool.num_cached == 0
    engine.add(request("good", prompt))
    assert tokens(drain(engine)["good"]) == cold(prompt, 4)
    assert engine.stats().prefix_hits_total == 0
