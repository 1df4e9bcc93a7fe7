"""Computes a step on the device: copies blocks, turns the step into tensors, runs the model, draws tokens.

Owns model, KV storage and sampler. Which sequences a step holds, and in which blocks, is the scheduler's decision;
`create.py` makes a runner from the settings.
"""

import time
from dataclasses import replace

import numpy as np
import torch

from pagedd.engine.batch import build_batch
from pagedd.engine.cuda_graphs import DecodeGraphs
from pagedd.engine.draw import Draw, PendingTokens
from pagedd.engine.errors import DeviceLostError
from pagedd.engine.kv.block_transfers import BlockTransfers
from pagedd.engine.kv.copy_costs import CopyCosts
from pagedd.engine.kv.open_pages import OpenPages
from pagedd.engine.kv.storage import KVStorage
from pagedd.engine.kv.stored_block import BlockCopy
from pagedd.engine.model.load import Model
from pagedd.engine.sampler import Sampler
from pagedd.engine.sequence import Sequence
from pagedd.engine.staging import to_device
from pagedd.engine.step import LaunchedStep, Runner, Sampled, ScheduledSequence, Step
from pagedd.engine.threads import threads_for

# As many tokens are drawn at a time as a step has rows of logits, but no fewer than the first, or than there are seats,
# so that forks, which share a row, are quick, and no more than the second: more save nothing, and each takes 80 bytes a
# token of the vocabulary. However many choices begin in one step, the memory is bounded.
MIN_DRAWN_TOGETHER, MAX_DRAWN_TOGETHER = 32, 64


class ModelRunner(Runner):
    """The real `Runner`. `seconds` sums prepare, forward and sample over all steps; waiting for a device is forward.

    Attributes:
        graphs: of decode steps, once they have been captured; `None` runs every step eagerly.
        copy_costs: what copies of blocks take, see `kv/copy_costs.py`.
    """

    def __init__(
        self,
        model: Model,
        storage: KVStorage,
        sampler: Sampler,
        device: torch.device,
        *,
        runs_ahead: bool = False,
        max_num_seqs: int = MAX_DRAWN_TOGETHER,
    ) -> None:
        super().__init__()
        self.runs_ahead = runs_ahead
        self.graphs: DecodeGraphs | None = None
        self.copy_costs = CopyCosts(storage.block_size)
        self._transfers = BlockTransfers(storage, self.copy_costs)
        self._nothing_pending = PendingTokens({}, torch.empty(0, dtype=torch.int64, device=device))
        self._pending = self._nothing_pending  # of the last launch
        self._model = model
        self._storage = storage
        self._sampler = sampler
        self._device = device
        self._max_num_seqs = max_num_seqs
        self.seconds = {"prepare": 0.0, "forward": 0.0, "sample": 0.0}

    @property
    def storage(self) -> KVStorage:
        return self._storage

    @property
    def open_pages(self) -> OpenPages | None:
        """Of a cache with open keys."""
        return self._storage.open_pages if self._storage.form.has_open_keys else None

    def close_pages(self, block_ids: list[int]) -> None:
        """What a step outside of serving left open belongs to nobody."""
        for block_id in block_ids:
            self._storage.open_pages.close(block_id)

    def run(self, step: Step) -> list[Sampled]:
        """The `num_draws` tokens of each of `step.scheduled`, in order."""
        return self.launch(step).result()

    @torch.inference_mode()
    def launch(self, step: Step) -> LaunchedStep:
        started = time.perf_counter()
        try:
            self._transfers.save(step.block_saves)
            self._storage.copy_blocks(step.block_copies)
            step.block_copies.clear()
            self._transfers.load(step.block_loads)
            self._storage.open_pages.settle()
            batch = build_batch(
                step.scheduled, self._storage.block_size, self._device, self._pending.rows, self.open_pages
            )
            if self._pending.rows:
                batch = replace(batch, token_ids=_fill_in_pending(batch.token_ids, self._pending.tokens))
            prepared = time.perf_counter()
            if self.graphs is not None and self.graphs.can_run(batch):
                logits = self.graphs.run(batch)
            else:
                logits = self._model.forward(batch, self._storage)
            computed = time.perf_counter()
            with threads_for(len(logits)):
                draws = self._draw(logits, step.scheduled)
            launched = LaunchedDraws([draw.start_copy() for draw in draws], self._device, self.seconds)
        except Exception as error:
            self._pending = self._nothing_pending
            return FailedLaunch(error)
        self.seconds["prepare"] += prepared - started
        self.seconds["forward"] += computed - prepared
        self.seconds["sample"] += time.perf_counter() - computed
        return launched

    def save_blocks(self, copies: list[BlockCopy]) -> None:
        self._transfers.beside_step(copies)

    def finish_saves(self) -> None:
        self._transfers.finish()

    def read_block(self, block_id: int) -> bytearray:
        return self._transfers.read(block_id)

    def check_device(self) -> None:
        if self._device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            raise DeviceLostError(f"{self._device} answers with: {error}") from error

    def _draw(self, logits: torch.Tensor, scheduled: list[ScheduledSequence]) -> list[Draw]:
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
        size = drawn_together(next_row, self._max_num_seqs)
        are_shared = len(rows) > next_row
        (drawn_rows,) = to_device([np.array(rows, dtype=np.int64)], self._device) if are_shared else (None,)
        draws: list[Draw] = []
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            part_logits = logits[part] if drawn_rows is None else logits[drawn_rows[part]]
            draws.append(self._sampler.draw(part_logits, sequences[part], num_ahead[part], self._pending))
        if self.runs_ahead:
            # A sequence's last row: with a draft, no step is launched ahead.
            owners = {sequence: row for row, sequence in enumerate(sequences)}
            tokens = torch.cat([draw.tokens for draw in draws]) if draws else self._nothing_pending.tokens
            self._pending = PendingTokens(owners, tokens)
        return draws


class LaunchedDraws:
    """A step whose tokens are on their way from the device."""

    has_failed = False

    def __init__(self, draws: list[Draw], device: torch.device, seconds: dict[str, float]) -> None:
        self._draws = draws
        self._seconds = seconds
        self._copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            # Blocking: whoever waits for it sleeps, where it would otherwise take a core.
            self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(device))

    def result(self) -> list[Sampled]:
        started = time.perf_counter()
        if self._copied is not None:
            self._copied.synchronize()
        self._seconds["forward"] += time.perf_counter() - started
        return [sampled for draw in self._draws for sampled in draw.read()]


class FailedLaunch:
    """A step that could not be launched."""

    has_failed = True

    def __init__(self, error: Exception) -> None:
        self._error = error

    def result(self) -> list[Sampled]:
        raise self._error


def _fill_in_pending(token_ids: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """[num_tokens] int64: those below 0 name rows of `drawn`, as `build_batch` says. No waiting for the device."""
    return torch.where(token_ids < 0, drawn[(-1 - token_ids).clamp_(min=0, max=len(drawn) - 1)], token_ids)


def drawn_together(num_rows: int, max_num_seqs: int) -> int:
    """How many tokens are drawn at a time from a step's `num_rows` rows of logits, where there are so many seats."""
    return min(max(num_rows, min(MIN_DRAWN_TOGETHER, max_num_seqs)), MAX_DRAWN_TOGETHER)
