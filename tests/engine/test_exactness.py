"""The real model in float32, end to end through the engine, against transformers' own `generate` on the same weights.

64 prompts of real text, 1 to 1500 tokens. A differing token is allowed only where the reference's two best logits lie
within 1e-3 of each other, and in at most 1 % of the prompts.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch

from pagedd.bench.reference_model import load_reference
from pagedd.daemon.models import resolve_model
from pagedd.daemon.text.tokenizer import TextTokenizer
from pagedd.engine.config import EngineConfig, SchedulerConfig
from pagedd.engine.engine import Engine
from pagedd.engine.kv.block_manager import BlockManager
from pagedd.engine.kv.storage import KVStorage
from pagedd.engine.model.load import LoadedModel, load_model
from pagedd.engine.request import Request
from pagedd.engine.runner import ModelRunner
from pagedd.engine.sampler import Sampler
from pagedd.engine.sampling_params import SamplingParams
from pagedd.engine.scheduler import Scheduler
from pagedd.kernels.kv_form import form_of

NUM_OUTPUT_TOKENS = 10
NUM_TOGETHER = 8
NEAR_TIE = 1e-3
# Every border of blocks of 8, 16 and 32, and some long ones.
LENGTHS = [
    *(1, 2, 3, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 47, 48, 49, 63, 64, 65, 95, 96, 97, 127, 128, 129),
    *(5, 11, 13, 19, 21, 23, 27, 29, 35, 37, 41, 43, 51, 53, 57, 59, 61, 67, 71, 73, 77, 79, 83, 89, 101, 103, 107),
    *(111, 140, 155, 170, 200, 230, 255, 256, 257, 511, 777, 1500),
]


@dataclass(frozen=True)
class Reference:
    """Greedy tokens of one prompt, and the gap between the two best logits at each of them."""

    prompt: list[int]
    token_ids: list[int]
    gaps: list[float]


@pytest.fixture(scope="module")
def prompts(model_gguf: Path) -> list[list[int]]:
    """Text of the Python documentation that comes with the interpreter; every fourth starts like the one before it."""
    tokenizer = TextTokenizer(resolve_model(str(model_gguf)))
    token_ids = tokenizer.encode("\n".join(topics[name] for name in sorted(topics)))
    cut: list[list[int]] = []
    for i, length in enumerate(LENGTHS):
        start = (i - i % 4) * 700
        cut.append(token_ids[start : start + length])
    return cut


@pytest.fixture(scope="module")
def references(model_gguf: Path, prompts: list[list[int]]) -> list[Reference]:
    """In batches of prompts of about the same length, padded on the left: weights are read once for all of a batch."""
    model = load_reference(model_gguf, torch.float32)
    stop_ids = model.generation_config.eos_token_id
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    made: dict[int, Reference] = {}
    for start in range(0, len(by_length), NUM_TOGETHER):
        batch = by_length[start : start + NUM_TOGETHER]
        width = len(prompts[batch[-1]])
        paddings = [width - len(prompts[i]) for i in batch]
        with torch.inference_mode():
            answer = model.generate(
                torch.tensor([[0] * padding + prompts[i] for i, padding in zip(batch, paddings, strict=True)]),
                attention_mask=torch.tensor([[0] * padding + [1] * (width - padding) for padding in paddings]),
                max_new_tokens=NUM_OUTPUT_TOKENS,
                min_new_tokens=NUM_OUTPUT_TOKENS,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        # `min_new_tokens` masks ends of sequence, and so do the stop ids that the engine is given below.
        logits = torch.stack(answer.logits, dim=1)  # [batch, step, vocab]
        logits[..., stop_ids] = -math.inf
        best = logits.topk(2).values
        gaps = (best[..., 0] - best[..., 1]).tolist()
        for row, i in enumerate(batch):
            made[i] = Reference(prompts[i], answer.sequences[row, width:].tolist(), gaps[row])
    return [made[i] for i in range(len(prompts))]


@pytest.fixture(scope="module")
def model(model_gguf: Path) -> LoadedModel:
    return load_model(EngineConfig(model=str(model_gguf), device="cpu", dtype="float32"), lambda fraction, what: None)


@dataclass(frozen=True, kw_only=True)
class Setting:
    name: str
    block_size: int = 16
    chunk: int = 4096
    seats: int = 64
    caching: bool = True
    num_tokens: int = 40_000
    one_by_one: bool = False
    num_guesses: int = 0
    preempts: bool = False  # later arrivals are more urgent, and the pool holds little more than the longest prompt


SETTINGS = [
    Setting(name="each alone, with guesses", one_by_one=True, caching=False, num_guesses=7),
    Setting(name="all at once", caching=False),
    Setting(name="all at once with prefix caching", chunk=256),
    Setting(name="blocks of 8 in chunks of 64", block_size=8, chunk=64),
    Setting(name="blocks of 32 in chunks of 16", block_size=32, chunk=16, seats=12),
    Setting(name="a pool so small that sequences are preempted", num_tokens=1600, chunk=256, preempts=True),
]


def run_engine(model: LoadedModel, setting: Setting, prompts: list[list[int]]) -> tuple[list[list[int]], Engine]:
    num_blocks = setting.num_tokens // setting.block_size
    config = SchedulerConfig(
        block_size=setting.block_size,
        num_blocks=num_blocks,
        max_num_seqs=setting.seats,
        max_num_batched_tokens=setting.chunk,
        max_model_len=1600,
        enable_prefix_caching=setting.caching,
        num_speculative_tokens=setting.num_guesses,
    )
    storage = KVStorage(model.config, num_blocks, setting.block_size, form_of(model.dtype), model.device)
    blocks = BlockManager(num_blocks, setting.block_size, enable_prefix_caching=setting.caching)
    # No time passes, in which who waits would become as urgent as who comes later.
    scheduler = Scheduler(config, blocks, clock=lambda: 0.0)
    engine = Engine(ModelRunner(model.model, storage, Sampler(), model.device), scheduler)
    answers: list[list[int]] = [[] for _ in prompts]
    params = SamplingParams(
        max_tokens=NUM_OUTPUT_TOKENS,
        min_tokens=NUM_OUTPUT_TOKENS,
        temperature=0.0,
        stop_token_ids=tuple(model.config.eos_token_ids),
    )
    order = list(range(len(prompts)))
    if setting.preempts:
        order = order[-1:] + order[:-1]  # the longest comes first, and everything after it is more urgent
    waiting = [
        Request(request_id=str(i), prompt_token_ids=prompts[i], params=params, priority=rank if setting.preempts else 0)
        for rank, i in enumerate(order)
    ]
    num_at_once = 1 if setting.one_by_one or setting.preempts else len(waiting)
    while waiting or engine.has_work:
        if not (setting.one_by_one and engine.has_work):
            for request in waiting[:num_at_once]:
                engine.add(request)
            del waiting[:num_at_once]
        for output in engine.step():
            answers[int(output.request_id)] += output.token_ids
    engine.check_integrity()
    return answers, engine


@pytest.mark.timeout(600)
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_greedy_tokens_equal_those_of_transformers(model, references, setting, record_property) -> None:
    answers, engine = run_engine(model, setting, [reference.prompt for reference in references])
    near_ties = 0
    for reference, answer in zip(references, answers, strict=True):
        if answer == reference.token_ids:
            continue
        first = next(i for i, pair in enumerate(zip(answer, reference.token_ids, strict=True)) if pair[0] != pair[1])
        assert reference.gaps[first] < NEAR_TIE, f"prompt of {len(reference.prompt)} differs at {first}"
        near_ties += 1
    record_property("near_ties", near_ties)
    assert near_ties <= len(references) // 100
    stats = engine.stats()
    assert (stats.preemptions_total > 0) == setting.preempts
    assert (stats.prefix_hits_total > 0) == setting.caching
    assert (stats.accepted_tokens_total > 0) == (setting.num_guesses > 0)
    assert stats.num_blocks_used == 0
