"""Slabs and static batches are what they say, on the real scheduler."""

from pagedd.bench.mechanisms_off import SlabManager, StaticBatches
from pagedd.bench.paging import OneTokenRunner
from pagedd.engine.config import SchedulerConfig
from pagedd.engine.engine import Engine
from pagedd.engine.kv.block_manager import BlockManager
from pagedd.engine.request import Request
from pagedd.engine.sampling_params import SamplingParams
from pagedd.engine.scheduler import Scheduler
from pagedd.engine.sequence import Sequence


def make_engine(blocks: BlockManager, num_seats: int = 8) -> Engine:
    config = SchedulerConfig(
        block_size=4,
        num_blocks=blocks.pool.num_blocks,
        max_num_seqs=num_seats,
        max_num_batched_tokens=64,
        max_model_len=32,
        enable_prefix_caching=blocks.enable_prefix_caching,
    )
    return Engine(OneTokenRunner(), Scheduler(config, blocks))


def request(name: str, num_output: int) -> Request:
    return Request(request_id=name, prompt_token_ids=[1, 2, 3], params=SamplingParams(max_tokens=num_output))


def test_a_pool_of_three_slabs_holds_three_sequences_however_short() -> None:
    engine = make_engine(SlabManager(3, 4, 32))
    for number in range(5):
        engine.add(request(str(number), 2 + number))
    engine.step()
    stats = engine.stats()
    assert (stats.num_requests_running, stats.num_requests_waiting) == (3, 2)
    assert stats.num_blocks_used == 3 * 8
    while engine.has_work:
        engine.step()
        engine.check_integrity()
        assert engine.stats().num_requests_running <= 3
    assert engine.stats().preemptions_total == 0
    assert engine.stats().num_blocks_used == 0


def test_a_sequence_may_fill_its_slab_to_the_end() -> None:
    engine = make_engine(SlabManager(1, 4, 32))
    engine.add(request("long", 29))
    num_steps = 0
    while engine.has_work:
        engine.step()
        num_steps += 1
    assert num_steps == 29


def test_a_slab_is_taken_whole_at_once_and_has_room_for_every_token() -> None:
    slabs = SlabManager(1, 4, 32)
    sequence = Sequence(
        request=request("a", 1),
        choice_index=0,
        token_ids=[1, 2, 3],
        num_prompt_tokens=3,
        arrival_s=0.0,
        due_s=0.0,
        order=0,
        priority=0,
    )
    assert (slabs.has_room(sequence, 1), slabs.num_missing_blocks(sequence, 1)) == (False, 8)
    assert slabs.grow(sequence, 1) == []
    assert (slabs.has_room(sequence, 32), slabs.num_missing_blocks(sequence, 32)) == (True, 0)


def test_a_static_batch_answers_together_and_only_what_was_asked() -> None:
    batches = StaticBatches(make_engine(BlockManager(64, 4)), num_seats=2)
    for name, num_output in (("short", 1), ("long", 3), ("later", 2)):
        batches.add(request(name, num_output))
    answers = [{output.request_id: len(output.token_ids) for output in batches.step()} for _ in range(5)]
    assert answers == [{}, {}, {"short": 1, "long": 3}, {}, {"later": 2}]
    assert not batches.has_work


def test_rows_of_a_static_batch_are_computed_until_the_longest_is_done() -> None:
    batches = StaticBatches(make_engine(BlockManager(64, 4)), num_seats=2)
    batches.add(request("short", 1))
    batches.add(request("long", 4))
    while batches.has_work:
        batches.step()
    assert batches.stats().generation_tokens_total == 8
