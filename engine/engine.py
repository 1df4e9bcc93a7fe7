"""The engine: requests of token ids in, drawn tokens out, one step at a time.

A step is three calls: the scheduler forms a batch, the runner computes it, the scheduler takes in what was drawn. On a
device that works by itself the next batch is formed and launched before that, so that it never waits for Python. Owns
that order, the clock of each part, and containment: a fault in a batch ends the request that causes it, not the others.
Knows no sockets and no text; the loop that calls `step` is `daemon/engine_process.py`.
"""

import logging
import time
import traceback
from collections import deque
from collections.abc import Callable

from pagedd.engine.errors import EngineError, IntegrityError
from pagedd.engine.faults import is_out_of_memory
from pagedd.engine.kv.disk_writer import DiskWriter
from pagedd.engine.kv.prefix_tree import PrefixTree, prefix_tree
from pagedd.engine.picture import block_info, sequence_snapshot, shown
from pagedd.engine.request import Preemption, Request, SequenceOutput
from pagedd.engine.scheduler import Scheduler
from pagedd.engine.sequence import SequenceState
from pagedd.engine.stats import BlockInfo, EngineSnapshot, EngineStats, Eviction
from pagedd.engine.step import LaunchedStep, Runner, Sampled, ScheduledSequence, Step

log = logging.getLogger(__name__)

# So many steps in a row in which nothing at all could be computed mean a broken device, not a bad request.
MAX_BARREN_STEPS = 3
# Chunks are halved for want of memory down to this: a smaller one saves nothing worth having.
LEAST_PIECE_TOKENS = 16
# While all that is live waits for the disk, there may be something new for the caller of `step` to do.
MAX_DISK_WAIT_S = 0.01
INTEGRITY_CHECK_INTERVAL_S = 60.0
# A picture stays small however many wait; the figures count them all.
MAX_SEQUENCES_SHOWN = 512


class Engine:
    """One model, one pool, one batch. Not thread-safe: one loop calls everything."""

    def __init__(self, runner: Runner, scheduler: Scheduler, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._clock = clock
        self._seconds = {"schedule": 0.0, "commit": 0.0}
        self._last_step = Step(number=0)
        self._launched: deque[tuple[Step, LaunchedStep]] = deque()  # at most one between two calls of `step`
        self._preemptions: list[Preemption] = []
        self._num_barren_steps = 0
        self._next_integrity_check_s = 0.0
        self._integrity_alarms = 0
        self._computing_s = 0.0
        tiers = scheduler.blocks.tiers
        self._disk_writer: DiskWriter | None = None
        if tiers is not None and tiers.disk is not None:
            self._disk_writer = DiskWriter(scheduler.blocks, tiers, tiers.disk, runner, clock)

    def add(self, request: Request) -> None:
        """Queues a request. Raises `EngineError` with the reason when it can never be served."""
        self._scheduler.add(request)

    def abort(self, request_id: str, choice_index: int | None = None) -> bool:
        """Ends a request (or one choice) silently; its blocks are idle when this returns. False when it is not live."""
        return self._scheduler.abort(request_id, choice_index)

    def set_priority(self, request_id: str, priority: int) -> bool:
        """Changes how urgent a live request is; False when it is not live."""
        return self._scheduler.set_priority(request_id, priority)

    def pace(self, tokens_per_second: float | None) -> None:
        """Keeps steps short for an engine whose caller waits between them; None is without a limit."""
        self._scheduler.budget.pace(tokens_per_second)

    @property
    def has_work(self) -> bool:
        return bool(self._launched) or self._scheduler.has_work

    def step(self) -> list[SequenceOutput]:
        """Computes one batch and returns what it did for each sequence that drew a token or ended."""
        self._preemptions = []
        if not self._runner.runs_ahead:
            step = self._schedule()
            if step.scheduled:
                return self._finish(step, lambda: self._runner.run(step))
        elif not self._launched:
            self._launch(self._schedule())
        if not self._launched:
            self._scheduler.blocks.await_reads(MAX_DISK_WAIT_S)
            return []
        step, launched = self._launched.popleft()
        if not launched.has_failed and self._scheduler.can_run_ahead(step):
            self._scheduler.assume(step)
            self._launch(self._schedule())
        return self._finish(step, launched.result)

    @property
    def preemptions(self) -> list[Preemption]:
        """Who lost seat and blocks in the last call of `step`."""
        return self._preemptions

    def stats(self) -> EngineStats:
        """Counters and gauges of this moment; see `stats.py`. O(running sequences)."""
        scheduler, blocks, counters = self._scheduler, self._scheduler.blocks, self._scheduler.counters
        return EngineStats(
            num_blocks=blocks.pool.num_blocks,
            block_size=blocks.block_size,
            max_num_seqs=scheduler.config.max_num_seqs,
            max_num_batched_tokens=scheduler.config.max_num_batched_tokens,
            max_model_len=scheduler.config.max_model_len,
            num_blocks_free=blocks.pool.num_free,
            num_blocks_cached=blocks.pool.num_cached,
            num_blocks_used=blocks.pool.num_used,
            num_live_tokens=blocks.num_live_tokens(scheduler.running),
            num_requests_running=scheduler.num_running,
            num_requests_waiting=scheduler.num_waiting,
            num_requests_awaiting_prefix=scheduler.num_awaiting_prefix,
            oldest_wait_s=scheduler.oldest_wait_s,
            num_scheduled_tokens=scheduler.num_scheduled_tokens,
            token_budget=scheduler.budget.chunk_tokens,
            steps_total=counters.steps,
            preemptions_total=counters.preemptions,
            prefix_queries_total=counters.prefix_queries,
            prefix_hits_total=counters.prefix_hits,
            recomputed_tokens_total=counters.recomputed_tokens,
            evictions_total=blocks.evictions_total,
            prompt_tokens_total=counters.prompt_tokens,
            generation_tokens_total=counters.generation_tokens,
            drafted_tokens_total=counters.drafted_tokens,
            accepted_tokens_total=counters.accepted_tokens,
            integrity_alarms_total=self._integrity_alarms,
            step_seconds={**self._seconds, **self._runner.seconds},
            kv_tiers=blocks.tiers.stats() if blocks.tiers is not None else {},
        )

    def snapshot(self) -> EngineSnapshot:
        """Every block, and every sequence up to `MAX_SEQUENCES_SHOWN`, between two steps. O(blocks + sequences)."""
        scheduler, blocks, now = self._scheduler, self._scheduler.blocks, self._clock()
        scheduled = {item.sequence: item.num_scheduled_tokens for item in self._last_step.scheduled}
        return EngineSnapshot(
            stats=self.stats(),
            block_states=blocks.pool.states(),
            block_ref_counts=blocks.pool.ref_counts(),
            block_fills=blocks.fills(scheduler.running),
            block_ages=blocks.pool.ages(),
            sequences=[
                sequence_snapshot(sequence, now, scheduled.get(sequence, 0))
                for sequence in shown(scheduler.live_sequences(), MAX_SEQUENCES_SHOWN)
            ],
        )

    def block(self, index: int) -> BlockInfo | None:
        """What block `index` holds and who uses it; None beyond the pool. O(live sequences' blocks)."""
        blocks = self._scheduler.blocks
        if not 0 <= index < blocks.pool.num_blocks:
            return None
        return block_info(blocks, self._scheduler.live_sequences(), index)

    def prefixes(self, limit: int) -> PrefixTree:
        """At most `limit` runs of the prefix index; see `kv/prefix_tree.py`."""
        return prefix_tree(self._scheduler.blocks.prefix_cache, self._scheduler.blocks.pool, limit)

    def evict_prefix(self, digest: bytes) -> Eviction | None:
        """Frees the idle blocks of the prefix that has the block of `digest`, from there on.

        None when nothing has that digest.
        """
        if self._disk_writer is not None:
            self._disk_writer.note_change()
        return self._scheduler.blocks.evict(digest)

    def check_integrity(self) -> None:
        """Raises `IntegrityError` when the bookkeeping of blocks contradicts itself."""
        self._scheduler.check_integrity()

    def after_step(self) -> bool:
        """To be called when what `step` returned is on its way to who waits for it: saves blocks to host memory.

        True when figures have changed.
        """
        if copies := self._scheduler.blocks.saves_between_steps():
            self._runner.save_blocks(copies)
        if self._disk_writer is not None:
            self._disk_writer.note_change()
        return bool(copies)

    @property
    def idle_work_due_s(self) -> float | None:
        """Seconds until `check_when_idle` should be called though nothing has come; None: never."""
        return self._disk_writer.due_s if self._disk_writer is not None else None

    def close(self, limit_s: float) -> None:
        """Brings to the disk what the next engine can begin with, in about `limit_s` at most. The engine is used up."""
        for sequence in list(self._scheduler.live_sequences()):
            self._scheduler.abort(sequence.request.request_id)
        given_up = Step(number=0)
        self._give_up_launched(given_up)
        if (tiers := self._scheduler.blocks.tiers) is not None:
            tiers.settle(given_up.block_saves, [])
        self.after_step()
        if self._disk_writer is not None:
            self._disk_writer.write_all(limit_s)
        if tiers is not None and tiers.disk is not None:
            tiers.disk.finish()

    def check_when_idle(self) -> bool:
        """To be called when there is no work: looks for drift, and brings a few blocks to the disk.

        True when figures have changed. Drift is looked for at most once a minute.

        Drift is an alarm in the log and in `integrity_alarms_total`; every block's content is then distrusted and the
        pool starts afresh, which costs the cache and no request.
        """
        if self.has_work:
            return False
        self._look_for_drift()
        return self.idle_work_due_s == 0 and self._disk_writer is not None and self._disk_writer.write_piece()

    def _look_for_drift(self) -> None:
        now = self._clock()
        if now < self._next_integrity_check_s:
            return
        self._next_integrity_check_s = now + INTEGRITY_CHECK_INTERVAL_S
        try:
            self.check_integrity()
        except IntegrityError:
            self._integrity_alarms += 1
            log.exception("KV bookkeeping drifted; all cached blocks are dropped and the pool starts afresh")
            self._scheduler.blocks.reset()
            if self._disk_writer is not None:
                self._disk_writer.note_change()

    def _schedule(self) -> Step:
        started = time.perf_counter()
        self._last_step = self._scheduler.schedule()
        self._preemptions += self._scheduler.preemptions
        self._seconds["schedule"] += time.perf_counter() - started
        return self._last_step

    def _launch(self, step: Step) -> None:
        if step.scheduled:
            self._scheduler.blocks.hold_releases(step.number)
            launched = self._runner.launch(step)
            self._launched.append((step, launched))
            if not launched.has_failed:
                self._settle_copies(step)

    def _finish(self, step: Step, result: Callable[[], list[Sampled]]) -> list[SequenceOutput]:
        try:
            sampled = result()
        except Exception as error:
            log.exception("step %d failed; its %d sequences are tried one by one", step.number, len(step.scheduled))
            ran_out = is_out_of_memory(error)
            # Its frames hold what the step had computed: memory that the next try may need.
            traceback.clear_frames(error.__traceback__)
        else:
            self._num_barren_steps = 0
            self._scheduler.budget.note_step()
            self._note_cost(step)
            if not self._runner.runs_ahead:
                self._settle_copies(step)
            return self._commit(step, sampled)
        self._give_up_launched(step)
        self._runner.check_device()
        if ran_out:
            log.warning("memory ran out; for a while at most %s", self._scheduler.budget.shrink(step))
        return self._run_one_by_one(step)

    def _note_cost(self, step: Step) -> None:
        """What computing a prompt's token takes, for whoever weighs it against copying.

        Only of steps that copied nothing: the clock has their copies, and the launch of the step after, in it.
        """
        if (tiers := self._scheduler.blocks.tiers) is None:
            return
        before_s, self._computing_s = self._computing_s, sum(self._runner.seconds.values())
        if step.has_transfers or any(launched.has_transfers for launched, _ in self._launched):
            return
        num_decoded = sum(1 + len(item.draft_token_ids) for item in step.scheduled)
        if step.num_scheduled_tokens > 2 * num_decoded:
            tiers.costs.compute.note(step.num_scheduled_tokens, self._computing_s - before_s)

    def _settle_copies(self, step: Step) -> None:
        if (tiers := self._scheduler.blocks.tiers) is not None:
            tiers.settle(step.block_saves, step.block_loads)

    def _give_up_launched(self, failed: Step) -> None:
        """Nothing that was formed on the results of `failed` counts: its sequences are scheduled again."""
        given_up: list[Step] = []
        while self._launched:
            step, launched = self._launched.popleft()
            given_up.append(step)
            try:
                launched.result()
            except Exception as error:
                traceback.clear_frames(error.__traceback__)  # what it had computed is in the way of the next try
            failed.block_copies += step.block_copies
            failed.block_saves += step.block_saves
            failed.block_loads += step.block_loads
            self._scheduler.blocks.step_finished(step.number)
        self._scheduler.blocks.step_finished(failed.number)
        self._scheduler.withdraw(failed)
        for item in (item for step in given_up for item in step.scheduled):
            self._scheduler.blocks.close_unwritten_blocks(item.sequence)

    def _commit(self, step: Step, sampled: list[Sampled]) -> list[SequenceOutput]:
        started = time.perf_counter()
        outputs = self._scheduler.commit(step, sampled)
        self._seconds["commit"] += time.perf_counter() - started
        return outputs

    def _run_one_by_one(self, step: Step) -> list[SequenceOutput]:
        """Finds the sequences that a failed batch failed for.

        Writing KV twice into the same slots is harmless. Block copies are not: the parts share the step's list, which
        the runner empties.

        Raises the last fault when nothing could be computed several steps in a row.
        """
        outputs: list[SequenceOutput] = []
        fault: Exception | None = None
        num_computed = 0
        for item in [item for item in step.scheduled if item.sequence.state is not SequenceState.FINISHED]:
            alone = step.part(item)
            try:
                sampled = self._run_in_pieces(alone)
            except Exception as error:
                log.exception("request %s failed alone", item.sequence.request.request_id)
                fault = error
                traceback.clear_frames(error.__traceback__)  # as in `_finish`
                outputs.append(self._scheduler.fail(item.sequence, *_describe_fault(error)))
            else:
                num_computed += 1
                outputs += self._commit(alone, sampled)
        self._settle_copies(step)
        self._num_barren_steps = 0 if num_computed else self._num_barren_steps + 1
        if fault is not None and self._num_barren_steps >= MAX_BARREN_STEPS:
            raise fault
        return outputs

    def _run_in_pieces(self, alone: Step) -> list[Sampled]:
        """One sequence's chunk; when it needs more memory than there is, as two halves one after the other."""
        (item,) = alone.scheduled
        half = (item.num_scheduled_tokens - len(item.draft_token_ids)) // 2
        try:
            return self._runner.run(alone)
        except Exception as error:
            if half < LEAST_PIECE_TOKENS or not is_out_of_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)
        log.warning("request %s goes on in halves of its chunk", item.sequence.request.request_id)
        rest = item.num_scheduled_tokens - half
        first = ScheduledSequence(item.sequence, item.start, half)
        second = ScheduledSequence(item.sequence, item.start + half, rest, item.samplers, item.draft_token_ids)
        self._run_in_pieces(alone.part(first))
        return self._run_in_pieces(alone.part(second))


def _describe_fault(error: Exception) -> tuple[str, str]:
    if isinstance(error, EngineError):
        return error.code, error.message
    if is_out_of_memory(error):
        return "out_of_memory", "the device ran out of memory in this request's step; shorten the prompt or try later"
    return "internal", f"the step failed with {type(error).__name__}; the daemon's log has the trace"
