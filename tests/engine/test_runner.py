"""A step as tensors, the order of what is drawn, and the factory that makes a runner from settings."""

import logging
from types import SimpleNamespace

import pytest
import torch

from pagedd.engine.config import EngineConfig
from pagedd.engine.errors import EngineError
from pagedd.engine.kv.storage import KVStorage
from pagedd.engine.model.config import ModelConfig
from pagedd.engine.model.cpu_decoder import KV_FORMS
from pagedd.engine.model.load import LoadedModel
from pagedd.engine.request import Request
from pagedd.engine.runner import (
    MAX_DRAWN_TOGETHER,
    MIN_DRAWN_TOGETHER,
    ModelRunner,
    _kv_form,
    build_batch,
    create_runner,
)
from pagedd.engine.sampling_params import SamplingParams
from pagedd.engine.sequence import Sequence
from pagedd.engine.step import Sampled, ScheduledSequence, Step
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

    def sample(self, logits, sequences, num_ahead) -> list[Sampled]:
        assert logits.shape == (len(sequences), 50)
        self.sequences += sequences
        self.largest = max(self.largest, len(sequences))
        return [Sampled(token_id) for token_id in logits.argmax(dim=1).tolist()]


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


def test_the_time_of_each_part_is_summed(runner) -> None:
    one = sequence([1], [0])
    assert runner.seconds == {"prepare": 0.0, "forward": 0.0, "sample": 0.0}
    runner.run(Step(0, [ScheduledSequence(one, 0, 1, [one])]))
    first = dict(runner.seconds)
    assert all(seconds > 0 for seconds in first.values())
    runner.run(Step(0, [ScheduledSequence(one, 0, 1, [one])]))
    assert all(runner.seconds[part] > first[part] for part in first)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("llama")
    config = AutoConfig.for_model(
        "llama",
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        eos_token_id=3,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def make(folder, **settings):
    settings = {"device": "cpu", "dtype": "float32", "num_threads": torch.get_num_threads()} | settings
    return create_runner(EngineConfig(model=str(folder), **settings), lambda share, what: None)


def test_the_factory_fills_in_every_choice(folder, caplog) -> None:
    with caplog.at_level(logging.INFO):
        runner, info = make(folder, max_num_seqs=3)
    assert (info.device, info.dtype, info.kv_cache_dtype, info.kernel_backend) == ("cpu", "float32", "float32", "torch")
    assert (info.vocab_size, info.max_model_len) == (40, 64)
    assert info.max_num_batched_tokens == 512
    assert info.kv_bytes_per_token == 2 * 2 * 1 * 8 * 4
    assert info.num_blocks == 3 * 4  # all seats at full length; far less than the memory would hold
    assert "KV pool: 12 blocks, 192 tokens, 0.00 GiB; 3.0 full-length requests fit" in caplog.text
    assert set(runner.seconds.values()) == {0.0}, "the warm-up is not a step"


def test_a_pool_smaller_than_the_budget_can_be_warmed_up(folder) -> None:
    _, info = make(folder, num_blocks=1, block_size=8)
    assert info.num_blocks == 1


def test_the_kv_cache_may_be_narrower_than_the_activations(folder) -> None:
    _, info = make(folder, num_blocks=2, kv_cache_dtype="bf16")
    assert (info.dtype, info.kv_cache_dtype) == ("float32", "bf16")


@pytest.mark.parametrize(("form", "num_bytes"), [("int8", 2 * 2 * 1 * 12), ("fp8", 2 * 2 * 1 * 12), ("int4", 32)])
def test_a_quantized_cache_serves_and_says_what_a_token_takes(folder, caplog, form, num_bytes) -> None:
    with caplog.at_level(logging.INFO):
        runner, info = make(folder, num_blocks=4, kv_cache_dtype=form)  # the warm-up fills it
    assert (info.dtype, info.kv_cache_dtype, info.kv_bytes_per_token) == ("float32", form, num_bytes)
    assert f"{form}, {num_bytes} bytes a token" in caplog.text
    assert runner._storage.num_bytes == 4 * 16 * num_bytes


def test_an_unknown_form_of_the_cache_is_refused_with_those_there_are(folder) -> None:
    with pytest.raises(EngineError, match=r"kv_cache_dtype 'int3', .* float32, bf16, fp16, int8, fp8, int4; use one"):
        make(folder, num_blocks=2, kv_cache_dtype="int3")


def test_a_form_that_only_torch_reads_is_refused_where_the_cpp_decoder_serves(folder) -> None:
    with pytest.raises(EngineError, match=r"kv_cache_dtype 'fp16', .* float32, bf16, int8, fp8, int4;"):
        _kv_form("fp16", loaded_with(kv_forms=KV_FORMS))


def test_the_form_of_the_cache_follows_the_weights_unless_it_is_asked_for() -> None:
    assert _kv_form("auto", loaded_with(has_quantized_weights=True)).name == "int8"
    assert _kv_form("auto", loaded_with(has_quantized_weights=False)).name == "bf16"
    assert _kv_form("float32", loaded_with(has_quantized_weights=True, kv_forms=KV_FORMS)).name == "float32"


def loaded_with(**attributes) -> LoadedModel:
    return LoadedModel(SimpleNamespace(**attributes), None, CPU, torch.bfloat16)  # type: ignore[arg-type]


def test_a_context_longer_than_the_models_own_is_refused_with_both_numbers(folder) -> None:
    with pytest.raises(EngineError, match=r"invalid_setting: max_model_len 65, the model's own context is 64"):
        make(folder, max_model_len=65)


def test_an_unknown_backend_is_refused(folder, monkeypatch) -> None:
    monkeypatch.setenv("PAGEDD_KERNELS", "abacus")
    with pytest.raises(EngineError, match=r"invalid_setting: PAGEDD_KERNELS='abacus'"):
        make(folder)


def test_memory_that_holds_no_block_is_refused(folder, monkeypatch) -> None:
    monkeypatch.setattr("pagedd.engine.runner.free_bytes", lambda device: 1000)
    with pytest.raises(EngineError, match="no_kv_memory"):
        make(folder)


def test_progress_ends_with_ready(folder) -> None:
    told: list[tuple[float, str]] = []
    config = EngineConfig(model=str(folder), device="cpu", num_blocks=2, num_threads=torch.get_num_threads())
    create_runner(config, lambda share, what: told.append((share, what)))
    assert told[-1] == (1.0, "ready")
    assert [share for share, _ in told] == sorted(share for share, _ in told)
