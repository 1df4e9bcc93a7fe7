"""Moves whole blocks between the pool and host memory, and measures what that takes.

On a CPU a copy is made when it is asked for. On a GPU saves in advance run in a stream of their own, beside the step
that is on its way, and the next step begins when they are done; what a step itself has to copy stands before it in its
own stream. Owns that stream and its events. Which blocks are moved is `tiers.py`'s business.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from pagedd.engine.kv.copy_costs import CopyCosts, RunningAverage
from pagedd.engine.kv.storage import KVStorage
from pagedd.engine.kv.stored_block import BlockCopy


class BlockTransfers:
    """Copies between `storage` and host memory. On a GPU the memory must be pinned, or copies hold the host up."""

    def __init__(self, storage: KVStorage, costs: CopyCosts) -> None:
        self._storage = storage
        self._costs = costs
        self._side: torch.cuda.Stream | None = None
        self._is_side_busy = False
        if storage.data.device.type == "cuda":
            self._side = torch.cuda.Stream(storage.data.device)  # type: ignore[no-untyped-call]
            self._step_has_copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._timings: deque[tuple[torch.cuda.Event, torch.cuda.Event, int, RunningAverage]] = deque()

    def save(self, saves: list[BlockCopy]) -> None:
        """Before anything of a step is written to a block; empties the list."""
        if self._side is not None and self._is_side_busy:
            torch.cuda.current_stream().wait_stream(self._side)
            self._is_side_busy = False
        self._in_step(saves, self._storage.read_blocks, self._costs.save)

    def load(self, loads: list[BlockCopy]) -> None:
        """After a step's `save`, and before it computes; empties the list."""
        self._in_step(loads, self._storage.write_blocks, self._costs.load)

    def beside_step(self, saves: list[BlockCopy]) -> None:
        """Copies blocks that nobody writes to until the next `save`."""
        if self._side is None:
            self._measure(saves, self._storage.read_blocks, self._costs.save)
            return
        # The host memory that is written now may be what that step still reads.
        self._side.wait_event(self._step_has_copied)
        with torch.cuda.stream(self._side):
            self._measure(saves, self._storage.read_blocks, self._costs.save)
        self._is_side_busy = True

    def finish(self) -> None:
        """Waits until host memory holds all that was to be copied there."""
        if self._side is not None:
            torch.cuda.synchronize(self._storage.data.device)

    def read(self, block_id: int) -> bytearray:
        """One block's bytes; waits for them."""
        data = bytearray(self._storage.block_bytes)
        self._storage.read_blocks([(block_id, data)])
        self.finish()
        return data

    def _in_step(
        self, copies: list[BlockCopy], copy: Callable[[Sequence[BlockCopy]], None], average: RunningAverage
    ) -> None:
        if not copies:
            return
        self._measure(copies, copy, average)
        copies.clear()
        if self._side is not None:
            self._step_has_copied.record(torch.cuda.current_stream())

    def _measure(
        self, copies: Sequence[BlockCopy], copy: Callable[[Sequence[BlockCopy]], None], average: RunningAverage
    ) -> None:
        if not copies:
            return
        if self._side is None:
            started = time.perf_counter()
            copy(copies)
            average.note(len(copies), time.perf_counter() - started)
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        copy(copies)
        end.record()
        self._timings.append((begin, end, len(copies), average))
        self._take_timings()

    def _take_timings(self) -> None:
        """Of the copies that are done by now."""
        while self._timings and self._timings[0][1].query():  # type: ignore[no-untyped-call]
            begin, end, count, average = self._timings.popleft()
            average.note(count, begin.elapsed_time(end) / 1000)
