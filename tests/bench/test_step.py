"""Parts of a step: differences of the engine's sums, over steps in which every sequence decodes."""

import pytest

from pagedd.bench.step import PARTS, StepTimes, measure, table_row
from pagedd.engine.config import SchedulerConfig
from pagedd.engine.engine import Engine
from pagedd.engine.kv.block_manager import BlockManager
from pagedd.engine.scheduler import Scheduler
from pagedd.engine.step import Runner, Sampled, Step


class SteadyRunner(Runner):
    """Claims 1 ms to prepare, 1 s to compute a prompt's step and 20 ms any other, 3 ms to sample."""

    def __init__(self) -> None:
        self.seconds = {"prepare": 0.0, "forward": 0.0, "sample": 0.0}

    def run(self, step: Step) -> list[Sampled]:
        has_prompt = any(item.num_scheduled_tokens > 1 for item in step.scheduled)
        self.seconds["prepare"] += 0.001
        self.seconds["forward"] += 1.0 if has_prompt else 0.020
        self.seconds["sample"] += 0.003
        return [Sampled(0) for item in step.scheduled for _ in item.samplers]


def make_engine(*, num_blocks: int) -> Engine:
    config = SchedulerConfig(
        block_size=8, num_blocks=num_blocks, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=128
    )
    return Engine(SteadyRunner(), Scheduler(config, BlockManager(num_blocks, 8)))


def test_only_steps_in_which_all_decode_are_measured():
    engine = make_engine(num_blocks=64)
    times = measure(engine, 4, vocab_size=100, context_len=40, num_steps=6, num_warmup_steps=2)
    assert times.batch_size == 4
    assert times.parts_s["forward"] == pytest.approx(0.020)
    assert times.parts_s["prepare"] == pytest.approx(0.001)
    assert times.parts_s["sample"] == pytest.approx(0.003)
    assert 40 <= times.context_len <= 50
    assert not engine.has_work


def test_a_pool_too_small_for_all_is_an_error_and_leaves_the_engine_idle():
    engine = make_engine(num_blocks=8)
    with pytest.raises(RuntimeError, match="raise num_blocks"):
        measure(engine, 4, vocab_size=100, context_len=40, num_steps=6, num_warmup_steps=2)
    assert not engine.has_work


def test_a_row_is_in_milliseconds_and_overhead_is_all_but_the_forward():
    times = StepTimes(8, 200, dict(zip(PARTS, (0.001, 0.002, 0.020, 0.004, 0.008), strict=True)), total_s=0.040)
    assert table_row(times) == {
        "batch": 8,
        "context": 200,
        "schedule ms": 1.0,
        "prepare ms": 2.0,
        "forward ms": 20.0,
        "sample ms": 4.0,
        "commit ms": 8.0,
        "overhead ms": pytest.approx(15.0),
        "total ms": 40.0,
        "tokens/s": pytest.approx(200.0),
    }
