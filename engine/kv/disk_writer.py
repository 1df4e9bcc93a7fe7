"""Brings what pool and host memory hold to the disk while there is nothing else to do, and before the engine ends.

Hottest first, so that what is lost when time or room runs out is what would be missed least. Between two pieces whoever
calls may look for work. Once all is written there is nothing to do, and nobody has to wake up for it, until the next
step. Owns the order and the pace; the files are `disk_tier.py`'s.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

from pagedd.engine.kv.block_manager import BlockManager
from pagedd.engine.kv.disk_tier import DiskTier
from pagedd.engine.kv.stored_block import BlockBytes, StoredBlock
from pagedd.engine.kv.tiers import Tiers
from pagedd.engine.step import Runner

# A pause between two messages of a chat is no reason to write yet.
IDLE_S = 5.0
# One piece is one file. A request that comes meanwhile waits for it: a few tens of milliseconds at most.
IDLE_PIECE_BYTES = 4 << 20
LAST_PIECE_BYTES = 32 << 20


class DiskWriter:
    """Writes what `blocks` and its host memory hold to `disk`. `clock` has seconds, monotonic."""

    def __init__(self, blocks: BlockManager, tiers: Tiers, disk: DiskTier, runner: Runner, clock: Callable[[], float]):
        self._blocks = blocks
        self._host = tiers.host
        self._disk = disk
        self._runner = runner
        self._clock = clock
        self._idle_since_s: float | None = None  # None: nothing has changed since all was written
        self._unwritten: deque[tuple[StoredBlock, Callable[[], BlockBytes]]] | None = None

    def note_step(self) -> None:
        """Something has changed, and whatever was about to be written may be gone."""
        self._idle_since_s = self._clock()
        self._unwritten = None

    @property
    def due_s(self) -> float | None:
        """Seconds until `write_piece` has something to do; None: not before the next step."""
        if self._idle_since_s is None:
            return None
        return max(0.0, self._idle_since_s + IDLE_S - self._clock())

    def write_piece(self, max_bytes: int = IDLE_PIECE_BYTES) -> bool:
        """Writes one file; False when all is written, or the disk takes no more. No sequence may be live."""
        if self._idle_since_s is None:
            return False
        if self._unwritten is None:
            self._runner.finish_saves()
            self._unwritten = deque(self._find_unwritten())
        count = min(len(self._unwritten), max(1, max_bytes // self._disk.form.block_bytes))
        piece = [self._unwritten.popleft() for _ in range(count)]
        has_written = bool(piece) and self._disk.write([(block, read()) for block, read in piece])
        if not has_written:
            self._idle_since_s = self._unwritten = None
        return has_written

    def write_all(self, limit_s: float) -> None:
        """As many files as there is time for."""
        end_s = time.monotonic() + limit_s
        while time.monotonic() < end_s and self.write_piece(LAST_PIECE_BYTES):
            pass

    def _find_unwritten(self) -> list[tuple[StoredBlock, Callable[[], BlockBytes]]]:
        """Of the hottest blocks that the disk has room for, those that are not there, and how to read them."""
        hottest: dict[bytes, tuple[StoredBlock, Callable[[], BlockBytes]]] = {}
        for block, read in self._hottest_first():
            if len(hottest) == self._disk.max_blocks:
                break
            hottest.setdefault(block.key, (block, read))
        # Those on the disk count as used now: what is written must not push them out.
        self._disk.touch(list(hottest))
        return [item for key, item in hottest.items() if key not in self._disk]

    def _hottest_first(self) -> Iterator[tuple[StoredBlock, Callable[[], BlockBytes]]]:
        blocks, runner, host = self._blocks, self._runner, self._host
        for block_id in blocks.pool.idle_newest_first():
            if (entry := blocks.prefix_cache.entry(block_id)) is not None:
                yield blocks.prefix_cache.stored_block(entry), partial(runner.read_block, block_id)
        if host is not None:
            for block in host.newest_first():
                yield block, partial(host.peek, block.key)
