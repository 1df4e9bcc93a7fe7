"""Graphs of decode steps, with a capture that records launches: buffers, ladder, padding."""

import pytest
import torch

from pagedd.bench.recorded_launches import capture_by_recording
from pagedd.engine.batch import Batch, build_batch
from pagedd.engine.cuda_graphs import DecodeGraphs, ladder
from pagedd.engine.kv.storage import KVStorage
from pagedd.engine.model.config import ModelConfig
from pagedd.engine.request import Request
from pagedd.engine.sampling_params import SamplingParams
from pagedd.engine.sequence import Sequence
from pagedd.engine.step import ScheduledSequence
from pagedd.kernels.kv_form import FORMS

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS, SCRATCH, MAX_MODEL_LEN = 4, 12, 12, 12


class ContextModel:
    """Keeps token ids where a model keeps keys; its logits are the sum and the length of the context."""

    def forward(self, batch: Batch, kv: KVStorage) -> torch.Tensor:
        keys, given = kv.layer(0)[0].reshape(-1), batch.attention
        keys[given.slot_mapping] = batch.token_ids.float()
        positions = torch.arange(given.block_tables.shape[1] * BLOCK_SIZE)
        slots = given.block_tables[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        is_context = positions < given.context_lens[:, None]
        return torch.stack([torch.where(is_context, keys[slots], 0.0).sum(1), given.context_lens.float()], dim=1)


class WaitingModel(ContextModel):
    """Asks the device for a length."""

    def forward(self, batch: Batch, kv: KVStorage) -> torch.Tensor:
        return super().forward(batch, kv) * int(batch.attention.context_lens.max())


class BranchingModel(ContextModel):
    """Decides by a Python integer that a real step has and a captured one does not."""

    def forward(self, batch: Batch, kv: KVStorage) -> torch.Tensor:
        return super().forward(batch, kv) * (2 if batch.attention.max_context_len == MAX_MODEL_LEN else 1)


@pytest.fixture
def storage() -> KVStorage:
    config = ModelConfig(architecture="x", vocab_size=2, num_layers=1, num_kv_heads=1, head_dim=1, max_position=99)
    storage = KVStorage(config, NUM_BLOCKS + 1, BLOCK_SIZE, FORMS["float32"], CPU)
    for plane in storage.planes:
        plane.copy_(torch.arange(plane.numel()).view(plane.shape))
    return storage


@pytest.fixture
def graphs(storage: KVStorage) -> DecodeGraphs:
    return graphs_of(ContextModel(), storage)


def graphs_of(model: ContextModel, storage: KVStorage) -> DecodeGraphs:
    return DecodeGraphs(
        model,
        storage,
        scratch_block=SCRATCH,
        max_num_seqs=5,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=2,
        device=CPU,
        capture=capture_by_recording,
    )


def decoding(*lengths: int) -> list[ScheduledSequence]:
    blocks = iter(range(NUM_BLOCKS))
    scheduled = []
    for length in lengths:
        sequence = Sequence(
            request=Request(request_id="r", prompt_token_ids=[7], params=SamplingParams(max_tokens=9)),
            choice_index=0,
            token_ids=[100 + i for i in range(length)],
            num_prompt_tokens=1,
            arrival_s=0.0,
            due_s=0.0,
            priority=0,
            order=0,
            block_table=[next(blocks) for _ in range(-(-length // BLOCK_SIZE))],
        )
        scheduled.append(ScheduledSequence(sequence, length - 1, 1, [sequence]))
    return scheduled


@pytest.mark.parametrize("lengths", [(1,), (5, 9), (4, 1, 8), (2, 2, 2, 12), (1, 2, 3, 4, 5)], ids=str)
def test_a_replayed_step_equals_an_eager_one_and_padding_touches_only_the_scratch_block(
    graphs, storage, lengths
) -> None:
    batch = build_batch(decoding(*lengths), BLOCK_SIZE, CPU)
    before = storage.data.clone()
    wanted = ContextModel().forward(batch, storage)
    written = storage.planes[0][0, :SCRATCH].clone()
    storage.data.copy_(before)
    assert torch.equal(graphs.run(batch), wanted)
    assert torch.equal(storage.planes[0][0, :SCRATCH], written)


def test_a_smaller_step_after_a_larger_one_sees_nothing_of_it(graphs) -> None:
    graphs.run(build_batch(decoding(9, 9, 9, 9), BLOCK_SIZE, CPU))
    few = build_batch(decoding(3, 2, 1), BLOCK_SIZE, CPU)
    assert graphs.run(few)[:, 1].tolist() == [3.0, 2.0, 1.0]


def test_all_rungs_share_one_table_of_logits(graphs) -> None:
    few = graphs.run(build_batch(decoding(3, 2), BLOCK_SIZE, CPU))
    many = graphs.run(build_batch(decoding(1, 2, 3, 4, 5), BLOCK_SIZE, CPU))
    assert few.data_ptr() == many.data_ptr()


def test_a_model_that_asks_the_device_cannot_be_captured(storage) -> None:
    with pytest.raises(RuntimeError, match="_local_scalar_dense waits for the device"):
        graphs_of(WaitingModel(), storage)


def test_a_model_that_decides_by_the_length_of_a_step_is_shown(storage) -> None:
    batch = build_batch(decoding(3, 2), BLOCK_SIZE, CPU)
    eager = BranchingModel().forward(batch, storage)
    assert torch.equal(graphs_of(BranchingModel(), storage).run(batch), 2 * eager)


def test_only_steps_in_which_all_decode_and_draw_are_replayed(graphs) -> None:
    (one,), many = decoding(3), decoding(1, 1, 1, 1, 1, 1, 1, 1, 1)
    assert graphs.can_run(build_batch([one], BLOCK_SIZE, CPU))
    assert not graphs.can_run(build_batch(many, BLOCK_SIZE, CPU))
    chunk = ScheduledSequence(one.sequence, 0, 3, [one.sequence])
    assert not graphs.can_run(build_batch([chunk], BLOCK_SIZE, CPU))
    silent = ScheduledSequence(one.sequence, 2, 1)
    assert not graphs.can_run(build_batch([silent], BLOCK_SIZE, CPU))


def test_the_ladder_ends_with_the_first_rung_that_holds_all_seats() -> None:
    assert ladder(1) == [1]
    assert ladder(5) == [1, 2, 4, 8]
    assert ladder(8) == [1, 2, 4, 8]
    assert ladder(10_000)[-1] == 256
