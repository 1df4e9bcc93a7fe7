"""One prompt alone and among others, in chunks of any size: with one thread the logits are the same to the last bit.

So are answers from a warm cache and from a cold one, in every form of the cache.
"""

import functools
from dataclasses import dataclass

import pytest
import torch

from pagedd.engine.config import EngineConfig, SchedulerConfig
from pagedd.engine.engine import Engine
from pagedd.engine.kv.block_manager import BlockManager
from pagedd.engine.kv.open_pages import num_pages_for
from pagedd.engine.kv.storage import KVStorage
from pagedd.engine.model.load import LoadedModel, load_model
from pagedd.engine.request import Request
from pagedd.engine.runner import ModelRunner
from pagedd.engine.sampler import Sampler
from pagedd.engine.sampling_params import SamplingParams
from pagedd.engine.scheduler import Scheduler
from pagedd.kernels.kv_form import FORMS, KVForm

NUM_TOKENS = 12


@dataclass(frozen=True)
class Served:
    """A model, and the form of the cache that it is run over."""

    loaded: LoadedModel
    kv_form: KVForm


@functools.cache
def load(path: str, dtype: str) -> LoadedModel:
    return load_model(EngineConfig(model=path, device="cpu", dtype=dtype), lambda share, what: None)


@pytest.fixture(
    scope="module",
    params=[
        ("float32", "float32"),
        ("bfloat16", "bf16"),
        ("bfloat16", "int8"),
        ("bfloat16", "fp8"),
        ("bfloat16", "k8v4"),
        ("bfloat16", "int4"),
    ],
    ids=lambda param: param[1],
)
def model(request, model_gguf, cpu_extension) -> Served:
    dtype, form = request.param
    return Served(load(str(model_gguf), dtype), FORMS[form])


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def prompt(index: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(index)
    return torch.randint(10, 49_000, (length,), generator=generator).tolist()


def make_engine(model: Served, chunk: int = 512, num_seats: int = 32, is_caching: bool = False) -> Engine:
    config = SchedulerConfig(
        block_size=16, num_blocks=400, max_num_seqs=num_seats, max_num_batched_tokens=chunk, max_model_len=256
    )
    loaded = model.loaded
    num_pages = num_pages_for(chunk, 16, num_seats, num_guesses=0, runs_ahead=False)
    storage = KVStorage(
        loaded.config, 400, 16, model.kv_form, loaded.device, num_pages=num_pages if model.kv_form.has_open_keys else 0
    )
    blocks = BlockManager(400, 16, enable_prefix_caching=is_caching, open_pages=storage.open_pages)
    return Engine(ModelRunner(loaded.model, storage, Sampler(), loaded.device), Scheduler(config, blocks))


def logprobs_of_first(model, num_others: int, chunk: int) -> list[tuple[int, float]]:
    """Greedy tokens of one prompt and their log-probabilities, every bit of which depends on the logits."""
    engine = make_engine(model, chunk)
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, num_logprobs=0)
    for index in range(1 + num_others):
        length = 100 if index == 0 else 3 + 5 * index
        engine.add(Request(request_id=str(index), prompt_token_ids=prompt(index, length), params=params))
    drawn: list[tuple[int, float]] = []
    while len(drawn) < NUM_TOKENS:
        for output in engine.step():
            if output.request_id == "0":
                drawn += [(t, p.logprob) for t, p in zip(output.token_ids, output.logprobs, strict=True)]
    return drawn


def test_neither_neighbours_nor_chunks_show(model, one_thread) -> None:
    alone = logprobs_of_first(model, 0, 512)
    for num_others, chunk in ((1, 512), (3, 64), (7, 512), (31, 512), (0, 64), (0, 16)):
        assert logprobs_of_first(model, num_others, chunk) == alone


def test_several_threads_split_long_contexts_and_drift_by_rounding_alone(model) -> None:
    alone = logprobs_of_first(model, 0, 512)
    among = logprobs_of_first(model, 31, 64)
    tolerance = 1e-4 if model.loaded.dtype == torch.float32 else 0.5
    for (token, logprob), (other_token, other_logprob) in zip(alone, among, strict=True):
        if token != other_token:
            break  # from here on the texts differ
        assert logprob == pytest.approx(other_logprob, abs=tolerance)
    if model.kv_form.name not in ("k8v4", "int4"):  # there rounding may turn into a whole step of a quantized number
        assert alone[0][0] == among[0][0]


def test_a_seeded_answer_is_the_same_alone_beside_an_unseeded_one_and_preempted(model, one_thread) -> None:
    def answer(*, num_seats: int = 32, mates: int = 0, urgent_at: int | None = None) -> list[int]:
        engine, drawn = make_engine(model, num_seats=num_seats), []
        seeded = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8, seed=42)
        engine.add(Request(request_id="A", prompt_token_ids=prompt(0, 40), params=seeded))
        for mate in range(mates):
            other = SamplingParams(max_tokens=30, temperature=1.0, seed=1000 + mate)
            engine.add(Request(request_id=f"B{mate}", prompt_token_ids=prompt(1 + mate, 20), params=other))
        while engine.has_work:
            if urgent_at is not None and len(drawn) == urgent_at and not engine.stats().preemptions_total:
                urgent = SamplingParams(max_tokens=3, seed=7)
                engine.add(Request(request_id="U", prompt_token_ids=prompt(9, 10), params=urgent, priority=100))
            for output in engine.step():
                drawn += output.token_ids if output.request_id == "A" else []
        assert (engine.stats().preemptions_total > 0) == (urgent_at is not None)
        return drawn

    alone = answer()
    assert [answer(mates=1) for _ in range(4)] == [alone] * 4
    assert answer(num_seats=1, urgent_at=5) == alone


def test_choices_that_share_cached_blocks_and_copy_them_answer_as_a_cold_engine(model, one_thread) -> None:
    """40 prompt tokens end inside a block: two choices share it, and the first to write into it gets a copy."""

    def answer(engine: Engine, name: str) -> tuple[dict[int, list[int]], int]:
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8, seed=42, n=2)
        engine.add(Request(request_id=name, prompt_token_ids=prompt(0, 40), params=params))
        drawn: dict[int, list[int]] = {0: [], 1: []}
        num_cached = 0
        while engine.has_work:
            for output in engine.step():
                drawn[output.choice_index] += output.token_ids
                num_cached = max(num_cached, output.num_cached_tokens)
        return drawn, num_cached

    cold, _ = answer(make_engine(model), "cold")
    assert cold[0] != cold[1]
    warm = make_engine(model, is_caching=True)
    assert answer(warm, "first") == (cold, 0)
    assert answer(warm, "second") == (cold, 32)
