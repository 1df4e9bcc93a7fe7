"""Decode steps as CUDA graphs: captured once for a ladder of batch sizes, then a single launch each.

A decode step is hundreds of small kernels, and launching them one by one takes a CPU longer than a GPU needs to run
them. A graph launches all, with the arguments that were captured: so inputs are buffers at fixed addresses, filled anew
for each step, and a batch is padded to the next size of the ladder with sequences of one token in a scratch block that
belongs to nobody; they all write its first slot, and read only that. Steps that prefill, or have more sequences than
the ladder, run eagerly.

Owns buffers, ladder and padding. What is captured is any `Model` whose kernels never wait for the device and whose
launches depend on nothing but Python integers, which here are those of the largest step.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from functools import partial

import torch

from pagedd.engine.batch import AttentionMetadata, Batch
from pagedd.engine.kv.storage import KVStorage
from pagedd.engine.model.load import Model
from pagedd.kernels.kv_form import KVForm

log = logging.getLogger(__name__)

# Above 2 sequences padding wastes less than half of a step; each further rung costs memory and time at the start.
LADDER = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)

Replay = Callable[[], object]
Capture = Callable[[Callable[[], object]], Replay]


class DecodeGraphs:
    """The graphs of one model over one KV cache.

    Args:
        scratch_block: a block of `storage` that belongs to nobody; padding writes there.
        max_num_seqs: seats; the ladder ends with the first rung that holds them all.
        max_model_len: longest context, for which launches are sized.
        capture: runs a function once and returns what replays it.
    """

    def __init__(
        self,
        model: Model,
        storage: KVStorage,
        *,
        scratch_block: int,
        max_num_seqs: int,
        max_model_len: int,
        vocab_size: int,
        device: torch.device,
        capture: Capture,
    ) -> None:
        self._model = model
        self._storage = storage
        self._sizes = ladder(max_num_seqs)
        self._scratch_block = scratch_block
        self._scratch_slot = scratch_block * storage.block_size
        self._scratch_page = storage.open_pages.open(scratch_block) if storage.form.has_open_keys else 0
        self._block_size = storage.block_size
        largest, max_blocks = self._sizes[-1], -(-max_model_len // storage.block_size)
        self._inputs = Batch(
            token_ids=torch.zeros(largest, dtype=torch.int64, device=device),
            positions=torch.zeros(largest, dtype=torch.int64, device=device),
            logits_rows=torch.arange(largest, device=device),
            attention=AttentionMetadata(
                query_starts=torch.arange(largest + 1, dtype=torch.int32, device=device),
                context_lens=torch.ones(largest, dtype=torch.int32, device=device),
                block_tables=torch.full((largest, max_blocks), scratch_block, dtype=torch.int32, device=device),
                slot_mapping=torch.full((largest,), self._scratch_slot, dtype=torch.int64, device=device),
                max_query_len=1,
                max_context_len=max_model_len,
                num_decodes=largest,
                open_slots=torch.full((largest,), self._scratch_page * storage.block_size, device=device),
                open_tables=torch.full((largest, 1), self._scratch_page, dtype=torch.int32, device=device),
            ),
        )
        # One for all rungs, each of which would otherwise keep its own beside the memory that they share.
        self._logits = torch.empty(largest, vocab_size, device=device)
        started = time.perf_counter()
        # Largest first: the smaller ones find their memory in what it took.
        self._replays = {size: capture(partial(self._forward, size)) for size in reversed(self._sizes)}
        seconds = time.perf_counter() - started
        log.info(
            "%d CUDA graphs are ready after %.1f s, for up to %d sequences that decode",
            len(self._sizes),
            seconds,
            largest,
        )

    def can_run(self, batch: Batch) -> bool:
        """Whether every sequence of `batch` decodes and draws, and there are no more than the ladder holds."""
        num_seqs = len(batch.attention.context_lens)
        return num_seqs == len(batch.token_ids) == len(batch.logits_rows) and num_seqs <= self._sizes[-1]

    def run(self, batch: Batch) -> torch.Tensor:
        """[num_seqs, vocab_size] float32, what `model.forward` returns; good until the next call."""
        num_seqs = len(batch.token_ids)
        size = self._sizes[bisect_left(self._sizes, num_seqs)]
        inputs, given = self._inputs, batch.attention
        inputs.token_ids[:num_seqs].copy_(batch.token_ids)
        inputs.positions[:num_seqs].copy_(batch.positions)
        inputs.attention.context_lens[:num_seqs].copy_(given.context_lens)
        inputs.attention.block_tables[:num_seqs, : given.block_tables.shape[1]].copy_(given.block_tables)
        inputs.attention.slot_mapping[:num_seqs].copy_(given.slot_mapping)
        if given.open_slots.numel():
            inputs.attention.open_slots[:num_seqs].copy_(given.open_slots)
            inputs.attention.open_tables[:num_seqs].copy_(given.open_tables)
        if num_seqs < size:
            padding = slice(num_seqs, size)
            inputs.token_ids[padding].zero_()
            inputs.positions[padding].zero_()
            inputs.attention.context_lens[padding].fill_(1)
            inputs.attention.block_tables[padding, 0].fill_(self._scratch_block)
            inputs.attention.slot_mapping[padding].fill_(self._scratch_slot)
            inputs.attention.open_slots[padding].fill_(self._scratch_page * self._block_size)
            inputs.attention.open_tables[padding].fill_(self._scratch_page)
        self._replays[size]()
        return self._logits[:num_seqs]

    def _forward(self, size: int) -> None:
        """What a graph is captured of."""
        self._logits[:size].copy_(self._model.forward(_first(self._inputs, size), self._storage))


def ladder(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture, ascending: the rungs up to the first that holds `max_num_seqs`."""
    end = bisect_left(LADDER, max_num_seqs) + 1
    return list(LADDER[:end])


def graph_bytes(
    model: Model, max_num_seqs: int, max_model_len: int, vocab_size: int, kv_form: KVForm, block_size: int
) -> int:
    """Upper bound on what inputs, logits and graphs hold.

    The activations of the largest rung are shared by the smaller ones; each graph takes some MiB of the driver's.
    """
    sizes = ladder(max_num_seqs)
    block_tables = sizes[-1] * -(-max_model_len // block_size) * 4
    logits = sizes[-1] * vocab_size * torch.float32.itemsize
    activations = model.activation_bytes(sizes[-1], sizes[-1], max_model_len, kv_form)
    return activations + logits + block_tables + len(sizes) * (4 << 20)


def capture_on_gpu() -> Capture:
    """`Capture` by CUDA. What is captured by one of these shares its memory: one graph runs at a time."""
    memory = torch.cuda.graph_pool_handle()

    def capture(forward: Callable[[], object]) -> Replay:
        forward()  # compiles kernels and makes workspaces, which a capture may not
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=memory):
            forward()
        replay: Replay = graph.replay
        return replay

    return capture


def _first(batch: Batch, size: int) -> Batch:
    """The first `size` sequences of a batch that decodes, as views."""
    given = batch.attention
    return Batch(
        token_ids=batch.token_ids[:size],
        positions=batch.positions[:size],
        logits_rows=batch.logits_rows[:size],
        attention=AttentionMetadata(
            query_starts=given.query_starts[: size + 1],
            context_lens=given.context_lens[:size],
            block_tables=given.block_tables[:size],
            slot_mapping=given.slot_mapping[:size],
            max_query_len=1,
            max_context_len=given.max_context_len,
            num_decodes=size,
            open_slots=given.open_slots[:size],
            open_tables=given.open_tables[:size],
        ),
    )
