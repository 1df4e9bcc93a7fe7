"""A step as tensors, and the order of what is drawn."""

import weakref

import pytest
import torch

from pagedd.engine.batch import build_batch
from pagedd.engine.config import SchedulerConfig
from pagedd.engine.draw import Draw
from pagedd.engine.engine import Engine
from pagedd.engine.errors import DeviceLostError
from pagedd.engine.kv.block_manager import BlockManager
from pagedd.engine.kv.host_tier import HostTier
from pagedd.engine.kv.storage import KVStorage
from pagedd.engine.kv.tiers import Tiers
from pagedd.engine.model.config import ModelConfig
from pagedd.engine.request import Request
from pagedd.engine.runner import (
    MAX_DRAWN_TOGETHER,
    MIN_DRAWN_TOGETHER,
    ModelRunner,
    drawn_together,
)
from pagedd.engine.sampling_params import SamplingParams
from pagedd.engine.scheduler import Scheduler
from pagedd.engine.sequence import PENDING, Sequence
from pagedd.engine.step import ScheduledSequence, Step
from pagedd.kernels.kv_form import FORMS

CPU = torch.device("cpu")


def sequence(token_ids: list[int], block_table: list[int], choice_index: int = 0) -> Sequence:
    request = Request(request_id="r", prompt_token_ids=token_ids, params=SamplingParams(max_tokens=4, temperature=0))
    return Sequence(
        request=request,
        choice_index=choice_index,
        token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids),
        arrival_s=0.0,
        due_s=0.0,
        priority=0,
        order=0,
        block_table=block_table,
    )


def test_a_step_becomes_flat_tensors_with_single_tokens_first() -> None:
    chunk, decode = sequence([10, 11, 12, 13, 14, 15, 16], [5, 2]), sequence([20, 21, 22, 23, 24], [7, 1])
    scheduled = [ScheduledSequence(chunk, 3, 3), ScheduledSequence(decode, 4, 1, [decode])]
    batch = build_batch(scheduled, block_size=4, device=CPU)
    assert batch.token_ids.tolist() == [24, 13, 14, 15]
    assert batch.positions.tolist() == [4, 3, 4, 5]
    assert batch.logits_rows.tolist() == [0]
    attention = batch.attention
    assert attention.query_starts.tolist() == [0, 1, 4]
    assert attention.context_lens.tolist() == [5, 6]
    assert attention.block_tables.tolist() == [[7, 1], [5, 2]]
    assert attention.slot_mapping.tolist() == [1 * 4 + 0, 5 * 4 + 3, 2 * 4 + 0, 2 * 4 + 1]
    assert (attention.max_query_len, attention.max_context_len, attention.num_decodes) == (3, 6, 1)
    assert batch.token_ids.dtype == batch.positions.dtype == attention.slot_mapping.dtype == torch.int64
    assert {attention.query_starts.dtype, attention.context_lens.dtype, attention.block_tables.dtype} == {torch.int32}


def test_logits_rows_follow_the_order_of_the_step_not_of_the_batch() -> None:
    prompt, decode = sequence([1, 2, 3], [0]), sequence([4, 5], [1])
    scheduled = [ScheduledSequence(prompt, 0, 3, [prompt]), ScheduledSequence(decode, 1, 1, [decode])]
    assert build_batch(scheduled, 4, CPU).logits_rows.tolist() == [3, 0]


def test_only_blocks_that_hold_context_are_named() -> None:
    long_table = sequence([1, 2], [3, 4, 5])
    batch = build_batch([ScheduledSequence(long_table, 0, 2)], 4, CPU)
    assert batch.attention.block_tables.tolist() == [[3]]


class TokenModel:
    """Logits that name the token they were computed for; remembers what the storage held at that time."""

    weight_bytes = 0

    def __init__(self) -> None:
        self.first_layer: torch.Tensor | None = None

    def forward(self, batch, kv) -> torch.Tensor:
        self.first_layer = kv.layer(0).clone()
        return torch.nn.functional.one_hot(batch.token_ids[batch.logits_rows], 50).float()


class GreedySampler:
    """Remembers whom it drew for."""

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        self.largest = 0

    def draw(self, logits, sequences, num_ahead, pending) -> Draw:
        assert logits.shape == (len(sequences), 50)
        self.sequences += sequences
        self.largest = max(self.largest, len(sequences))
        return Draw(logits.argmax(dim=1), torch.ones(len(logits), dtype=torch.bool))


@pytest.fixture
def storage() -> KVStorage:
    config = ModelConfig(architecture="x", vocab_size=50, num_layers=1, num_kv_heads=1, head_dim=2, max_position=99)
    storage = KVStorage(config, num_blocks=8, block_size=4, form=FORMS["float32"], device=CPU)
    storage.layer(0).copy_(torch.arange(8).view(1, 8, 1, 1, 1).expand(2, 8, 1, 4, 2))
    return storage


@pytest.fixture
def runner(storage) -> ModelRunner:
    return ModelRunner(TokenModel(), storage, GreedySampler(), CPU)


def test_tokens_come_back_in_the_order_of_the_step(runner) -> None:
    prompt, middle, decode = sequence([1, 2, 3], [0]), sequence([6, 7, 8], [2]), sequence([4, 5], [1])
    scheduled = [
        ScheduledSequence(prompt, 0, 3, [prompt]),
        ScheduledSequence(middle, 0, 2),
        ScheduledSequence(decode, 1, 1, [decode]),
    ]
    assert [sampled.token_id for sampled in runner.run(Step(0, scheduled))] == [3, 5]


def test_forks_draw_from_one_row_and_each_by_itself(runner) -> None:
    first, second, other = sequence([1, 2, 3], [0]), sequence([1, 2, 3], [0], choice_index=1), sequence([9], [1])
    scheduled = [ScheduledSequence(first, 0, 3, [first, second]), ScheduledSequence(other, 0, 1, [other])]
    assert [sampled.token_id for sampled in runner.run(Step(0, scheduled))] == [3, 3, 9]
    assert runner._sampler.sequences == [first, second, other]


def test_many_forks_are_drawn_a_few_at_a_time_in_their_order(runner) -> None:
    num_choices = 2 * MIN_DRAWN_TOGETHER + 3
    forks = [sequence([1, 2, 3], [0], choice_index=i) for i in range(num_choices)]
    other = sequence([9], [1])
    scheduled = [ScheduledSequence(forks[0], 0, 3, forks), ScheduledSequence(other, 0, 1, [other])]
    assert [sampled.token_id for sampled in runner.run(Step(0, scheduled))] == [3] * num_choices + [9]
    assert runner._sampler.sequences == [*forks, other]
    assert runner._sampler.largest == MIN_DRAWN_TOGETHER


def test_a_batch_of_very_many_seats_is_drawn_in_parts(runner) -> None:
    seats = [sequence([i % 50], [0]) for i in range(MAX_DRAWN_TOGETHER + 1)]
    sampled = runner.run(Step(0, [ScheduledSequence(seat, 0, 1, [seat]) for seat in seats]))
    assert [draw.token_id for draw in sampled] == [i % 50 for i in range(MAX_DRAWN_TOGETHER + 1)]
    assert runner._sampler.largest == MAX_DRAWN_TOGETHER


def test_a_step_in_which_nobody_draws_asks_no_sampler(runner) -> None:
    middle = sequence([6, 7, 8], [2])
    assert runner.run(Step(0, [ScheduledSequence(middle, 0, 2)])) == []
    assert runner._sampler.sequences == []


def test_blocks_are_copied_before_the_model_runs_and_never_again(runner) -> None:
    fork = sequence([1, 2], [3])
    step = Step(0, [ScheduledSequence(fork, 0, 2)], [(6, 3)])
    runner.run(step)
    assert step.block_copies == []
    assert runner._model.first_layer[:, 3].unique().tolist() == [6]
    assert runner._model.first_layer[:, 6].unique().tolist() == [6]


def test_a_token_that_is_still_on_its_way_is_taken_from_the_device(storage) -> None:
    runner = ModelRunner(TokenModel(), storage, GreedySampler(), CPU, runs_ahead=True)
    first, second = sequence([1, 2, 30], [0]), sequence([4, 40], [1])
    launched = runner.launch(
        Step(0, [ScheduledSequence(first, 0, 3, [first]), ScheduledSequence(second, 1, 1, [second])])
    )
    for waiting in (first, second):
        waiting.token_ids.append(PENDING)
    third = sequence([5, 6], [2])
    scheduled = [
        ScheduledSequence(second, 2, 1, [second]),
        ScheduledSequence(third, 0, 2, [third]),
        ScheduledSequence(first, 3, 1, [first]),
    ]
    ahead = runner.launch(Step(1, scheduled))
    assert [draw.token_id for draw in launched.result()] == [30, 40]
    assert [draw.token_id for draw in ahead.result()] == [40, 6, 30]


def test_a_token_on_its_way_that_nobody_draws_is_a_fault_and_not_an_id(storage) -> None:
    runner = ModelRunner(TokenModel(), storage, GreedySampler(), CPU, runs_ahead=True)
    stray = sequence([1, 2], [0])
    stray.token_ids.append(PENDING)
    launched = runner.launch(Step(0, [ScheduledSequence(stray, 2, 1, [stray])]))
    assert launched.has_failed
    with pytest.raises(KeyError):
        launched.result()


def test_what_a_failed_step_had_computed_is_let_go_before_it_is_tried_again(runner) -> None:
    held: list[weakref.ref[torch.Tensor]] = []
    seen: list[bool] = []

    def forward(batch, kv) -> torch.Tensor:
        activations = torch.zeros(3)
        seen.append(any(reference() is not None for reference in held))
        held.append(weakref.ref(activations))
        if len(held) == 1:
            raise MemoryError
        return torch.nn.functional.one_hot(batch.token_ids[batch.logits_rows], 50).float()

    runner._model.forward = forward
    config = SchedulerConfig(block_size=4, num_blocks=8, max_num_seqs=2, max_num_batched_tokens=64, max_model_len=32)
    engine = Engine(runner, Scheduler(config, BlockManager(8, 4)))
    engine.add(Request(request_id="a", prompt_token_ids=[1, 2, 3], params=SamplingParams(max_tokens=1)))
    outputs = engine.step()
    assert outputs[0].error_code is None
    assert seen == [False, False]


def test_a_fault_at_the_launch_is_told_by_the_result(runner) -> None:
    runner._model.forward = lambda batch, kv: 1 / 0
    one = sequence([1], [0])
    launched = runner.launch(Step(0, [ScheduledSequence(one, 0, 1, [one])]))
    with pytest.raises(ZeroDivisionError):
        launched.result()


def test_a_device_that_does_not_answer_is_lost(storage, monkeypatch) -> None:
    def synchronize(device: torch.device) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    ModelRunner(TokenModel(), storage, GreedySampler(), CPU).check_device()
    lost = ModelRunner(TokenModel(), storage, GreedySampler(), CPU)
    lost._device = torch.device("cuda", 0)
    with pytest.raises(DeviceLostError, match="cuda:0 answers with: CUDA error"):
        lost.check_device()


def test_the_copies_of_a_step_are_not_taken_for_the_cost_of_its_tokens(runner, storage) -> None:
    host = HostTier(memoryview(bytearray(20 * storage.block_bytes)), storage.block_bytes)
    tiers = Tiers(host, None, runner.copy_costs)
    config = SchedulerConfig(block_size=4, num_blocks=6, max_num_seqs=2, max_num_batched_tokens=64, max_model_len=24)
    engine = Engine(runner, Scheduler(config, BlockManager(6, 4, tiers=tiers)))
    noted = []
    for prompt in ([*range(13)], [*range(20, 42)], [*range(13)]):  # computed, evicts, is loaded
        engine.add(Request(request_id="a", prompt_token_ids=prompt, params=SamplingParams(max_tokens=1)))
        while engine.has_work:
            engine.step()
        noted.append((runner.copy_costs.compute.total, runner.copy_costs.load.total))
    assert noted == [(13, 0), (13, 0), (13, 3)]


def test_the_time_of_each_part_is_summed(runner) -> None:
    one = sequence([1], [0])
    assert runner.seconds == {"prepare": 0.0, "forward": 0.0, "sample": 0.0}
    runner.run(Step(0, [ScheduledSequence(one, 0, 1, [one])]))
    first = dict(runner.seconds)
    assert all(seconds > 0 for seconds in first.values())
    runner.run(Step(0, [ScheduledSequence(one, 0, 1, [one])]))
    assert all(runner.seconds[part] > first[part] for part in first)


def test_few_seats_draw_few_at_a_time_so_that_little_memory_is_kept_for_it() -> None:
    assert [drawn_together(rows, 4) for rows in (1, 4, 12, 500)] == [4, 4, 12, MAX_DRAWN_TOGETHER]
    assert [drawn_together(rows, 100) for rows in (1, 500)] == [MIN_DRAWN_TOGETHER, MAX_DRAWN_TOGETHER]
