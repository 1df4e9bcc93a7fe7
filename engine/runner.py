"""Computes a step on the device: copies blocks, turns the step into tensors, runs the model, draws tokens.

Owns model, KV storage and sampler. Which sequences a step holds, and in which blocks, is the scheduler's decision.
`create_runner` makes one from the settings.
"""

import itertools
import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pagedd.engine.batch import AttentionMetadata, Batch
from pagedd.engine.config import EngineConfig
from pagedd.engine.errors import EngineError
from pagedd.engine.freed_memory import return_freed_memory
from pagedd.engine.info import EngineInfo
from pagedd.engine.kv.storage import KVStorage, free_bytes, pool_of, size_pool
from pagedd.engine.model.load import LoadedModel, Model, device_name, load_model, num_physical_cores
from pagedd.engine.request import Request
from pagedd.engine.sampler import WORKING_BYTES_PER_LOGIT, Sampler
from pagedd.engine.sampling_params import SamplingParams
from pagedd.engine.sequence import Sequence
from pagedd.engine.step import Runner, Sampled, ScheduledSequence, Step
from pagedd.kernels import ops
from pagedd.kernels.kv_form import FORMS, KVForm, form_of

log = logging.getLogger(__name__)

DEFAULT_BATCHED_TOKENS = {"cpu": 512, "cuda": 2048}
DEFAULT_MEMORY_SHARE = {"cpu": 0.3, "cuda": 0.9}
# As many tokens are drawn at a time as a step has rows of logits, but no fewer than the first, so that forks, which
# share a row, are quick, and no more than the second: more save nothing, and each takes 80 bytes a token of the
# vocabulary. However many choices begin in one step, the memory is bounded.
MIN_DRAWN_TOGETHER, MAX_DRAWN_TOGETHER = 32, 64


class ModelRunner(Runner):
    """The real `Runner`. `seconds` sums prepare, forward and sample over all steps."""

    def __init__(self, model: Model, storage: KVStorage, sampler: Sampler, device: torch.device) -> None:
        self._model = model
        self._storage = storage
        self._sampler = sampler
        self._device = device
        self.seconds = {"prepare": 0.0, "forward": 0.0, "sample": 0.0}

    @torch.inference_mode()
    def run(self, step: Step) -> list[Sampled]:
        """The `num_draws` tokens of each of `step.scheduled`, in order."""
        started = time.perf_counter()
        self._storage.copy_blocks(step.block_copies)
        step.block_copies.clear()
        batch = build_batch(step.scheduled, self._storage.block_size, self._device)
        prepared = time.perf_counter()
        logits = self._model.forward(batch, self._storage)
        computed = time.perf_counter()
        sampled = self._sample(logits, step.scheduled)
        finished = time.perf_counter()
        self.seconds["prepare"] += prepared - started
        self.seconds["forward"] += computed - prepared
        self.seconds["sample"] += finished - computed
        return sampled

    def _sample(self, logits: torch.Tensor, scheduled: list[ScheduledSequence]) -> list[Sampled]:
        # Forks draw from one row, each by its own parameters and randomness; a draft has a row for each of its draws.
        rows: list[int] = []
        sequences: list[Sequence] = []
        num_ahead: list[int] = []
        next_row = 0
        for item in scheduled:
            if not item.samplers:
                continue
            num_guesses = len(item.draft_token_ids)
            rows += range(next_row, next_row + num_guesses)
            rows += [next_row + num_guesses] * len(item.samplers)
            sequences += [item.sequence] * num_guesses + item.samplers
            num_ahead += [*range(num_guesses), *[num_guesses] * len(item.samplers)]
            next_row += num_guesses + 1
        size = drawn_together(next_row)
        is_each_row_drawn_once = len(rows) == next_row
        sampled: list[Sampled] = []
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            part_logits = logits[part] if is_each_row_drawn_once else logits[rows[part]]
            sampled += self._sampler.sample(part_logits, sequences[part], num_ahead[part])
        return sampled


def drawn_together(num_rows: int) -> int:
    """How many tokens are drawn at a time from a step's `num_rows` rows of logits."""
    return min(max(num_rows, MIN_DRAWN_TOGETHER), MAX_DRAWN_TOGETHER)


def build_batch(scheduled: list[ScheduledSequence], block_size: int, device: torch.device) -> Batch:
    """The step's tokens, flattened: sequences with one token first. `logits_rows` is in the order of `scheduled`."""
    ordered = sorted(scheduled, key=lambda item: item.num_scheduled_tokens != 1)  # stable
    starts = np.array([item.start for item in ordered], dtype=np.int64)
    query_lens = np.array([item.num_scheduled_tokens for item in ordered], dtype=np.int64)
    context_lens = starts + query_lens
    query_starts = np.zeros(len(ordered) + 1, dtype=np.int64)
    np.cumsum(query_lens, out=query_starts[1:])

    num_blocks = -(-context_lens // block_size)
    block_tables = np.zeros((len(ordered), int(num_blocks.max())), dtype=np.int32)
    for row, (item, count) in enumerate(zip(ordered, num_blocks.tolist(), strict=True)):
        block_tables[row, :count] = item.sequence.block_table[:count]

    owners = np.repeat(np.arange(len(ordered)), query_lens)  # which sequence each token belongs to
    positions = np.arange(query_starts[-1]) + np.repeat(starts - query_starts[:-1], query_lens)
    slots = block_tables[owners, positions // block_size].astype(np.int64) * block_size + positions % block_size
    tokens = itertools.chain.from_iterable(item.token_ids for item in ordered)
    end_rows = {id(item): row for item, row in zip(ordered, query_starts[1:].tolist(), strict=True)}
    logits_rows = [
        row
        for item in scheduled
        if item.samplers
        for row in range(end_rows[id(item)] - 1 - len(item.draft_token_ids), end_rows[id(item)])
    ]

    def tensor(values: NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(values).to(device, dtype, non_blocking=True)

    return Batch(
        token_ids=tensor(np.fromiter(tokens, dtype=np.int64, count=int(query_starts[-1])), torch.int64),
        positions=tensor(positions, torch.int64),
        logits_rows=tensor(np.array(logits_rows, dtype=np.int64), torch.int64),
        attention=AttentionMetadata(
            query_starts=tensor(query_starts, torch.int32),
            context_lens=tensor(context_lens, torch.int32),
            block_tables=tensor(block_tables, torch.int32),
            slot_mapping=tensor(slots, torch.int64),
            max_query_len=int(query_lens.max()),
            max_context_len=int(context_lens.max()),
            num_decodes=int(np.count_nonzero(query_lens == 1)),
        ),
    )


def create_runner(config: EngineConfig, progress: Callable[[float, str], None]) -> tuple[ModelRunner, EngineInfo]:
    """Loads the model, sizes and allocates the KV pool, and runs once so that the first request isn't slow.

    Args:
        progress: called with the share done, 0 … 1, and what is being done.

    Raises:
        EngineError: what `load_model` and `size_pool` raise, or `invalid_setting`.
    """
    started = time.perf_counter()
    torch.set_num_threads(config.num_threads or num_physical_cores())
    loaded = load_model(config, lambda share, what: progress(0.9 * share, what))
    device, model = loaded.device, loaded.model
    try:
        backend = ops.select_backend(device)
    except ValueError as error:
        raise EngineError("invalid_setting", str(error)) from error
    if model.own_kernels is None:
        log.info("kernels: %s, because %s", backend.name, backend.reason)
    max_model_len = _max_model_len(config.max_model_len, loaded.config.max_position)
    budget = config.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS[device.type]
    kv_form = _kv_form(config.kv_cache_dtype, loaded)
    bytes_per_block = KVStorage.bytes_per_block(loaded.config, kv_form, config.block_size)
    max_logits_rows = min(budget, config.max_num_seqs * (1 + config.num_speculative_tokens))

    if config.num_blocks is None:
        pool = size_pool(
            free_bytes=free_bytes(device),
            share=config.gpu_memory_utilization or DEFAULT_MEMORY_SHARE[device.type],
            reserve_bytes=model.activation_bytes(budget, max_logits_rows, max_model_len, kv_form)
            + drawn_together(max_logits_rows) * loaded.config.vocab_size * WORKING_BYTES_PER_LOGIT,
            bytes_per_block=bytes_per_block,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
        )
    else:
        pool = pool_of(config.num_blocks, bytes_per_block, config.block_size, max_model_len)
    log.info("%s; %s, %d bytes a token", pool.describe(), kv_form.name, bytes_per_block // config.block_size)
    storage = KVStorage(loaded.config, pool.num_blocks, config.block_size, kv_form, device)

    runner = ModelRunner(model, storage, Sampler(), device)
    progress(0.9, "warming up")
    _warm_up(runner, min(budget, max_model_len, pool.num_tokens), max_logits_rows, config.block_size)
    return_freed_memory()
    progress(1.0, "ready")
    info = EngineInfo(
        device=str(device),
        device_name=device_name(device),
        dtype=_name(loaded.dtype),
        kv_cache_dtype=kv_form.name,
        kernel_backend=model.own_kernels or backend.name,
        vocab_size=loaded.config.vocab_size,
        max_model_len=max_model_len,
        # The last token of a request is never computed, so its KV needs no slot.
        max_request_tokens=min(max_model_len, pool.num_tokens + 1),
        block_size=config.block_size,
        num_blocks=pool.num_blocks,
        kv_bytes_per_token=bytes_per_block // config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=budget,
        model_bytes=model.weight_bytes,
        load_seconds=time.perf_counter() - started,
    )
    return runner, info


def _warm_up(runner: ModelRunner, num_tokens: int, num_logits_rows: int, block_size: int) -> None:
    """Runs a full chunk with as many draws as there may be, and a decode, in the pool's first blocks, still unowned."""
    request = Request(request_id="warm-up", prompt_token_ids=[0] * num_tokens, params=SamplingParams(max_tokens=1))
    sequence = Sequence(
        request=request,
        choice_index=0,
        token_ids=list(request.prompt_token_ids),
        num_prompt_tokens=num_tokens,
        arrival_s=0.0,
        due_s=0.0,
        priority=0,
        order=0,
        block_table=list(range(-(-num_tokens // block_size))),
    )
    draft = [0] * (min(num_tokens, num_logits_rows) - 1)
    runner.run(Step(0, [ScheduledSequence(sequence, 0, num_tokens, [sequence], draft)]))
    runner.run(Step(0, [ScheduledSequence(sequence, num_tokens - 1, 1, [sequence])]))
    runner.seconds.update(prepare=0.0, forward=0.0, sample=0.0)


def _max_model_len(asked: int | None, max_position: int) -> int:
    if asked is not None and asked > max_position:
        raise EngineError(
            "invalid_setting", f"max_model_len {asked}, the model's own context is {max_position}; lower max_model_len"
        )
    return asked or max_position


def _kv_form(name: str, loaded: LoadedModel) -> KVForm:
    """`auto` is 8 bits beside quantized weights, which cost more accuracy than that, else the activations' dtype."""
    model = loaded.model
    if name == "auto":
        return FORMS["int8"] if model.has_quantized_weights else form_of(loaded.dtype)
    if name not in model.kv_forms:
        usable = ", ".join(form for form in FORMS if form in model.kv_forms)
        raise EngineError(
            "invalid_setting",
            f"kv_cache_dtype {name!r}, this model's kernels here have {usable}; use one of these or auto",
        )
    return FORMS[name]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
