"""Brings what pool and host memory hold to the disk while there is nothing else to do, and before the engine ends.

Hottest first, so that what is lost when time or room runs out is what would be missed least. Between two pieces whoever
calls may look for work, and what was to be written may be forgotten. Once all is written there is nothing to do, and
nobody has to wake up for it, until something changes. Owns the order and the pace; the files are `disk_tier.py`'s.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator

from pagedd.engine.kv.block_manager import BlockManager
from pagedd.engine.kv.disk_segment import Segment
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
        self._unwritten: deque[tuple[StoredBlock, int | None]] | None = None  # and in which block of the pool

    def note_change(self) -> None:
        """There was a step, or contents were forgotten: whatever was about to be written may be gone."""
        self._idle_since_s = self._clock()
        self._unwritten = None

    @property
    def due_s(self) -> float | None:
        """Seconds until `write_piece` has something to do; None: not before the next change."""
        if self._idle_since_s is None:
            return None
        return max(0.0, self._idle_since_s + IDLE_S - self._clock())

    def write_piece(self, max_bytes: int = IDLE_PIECE_BYTES) -> bool:
        """Writes one file; False when all is written, or the disk takes no more, or none now. No sequence may be live.

        While the disk is stuck, what is to be written stays due, after another pause.
        """
        if self._idle_since_s is None:
            return False
        if self._disk.is_stuck:
            self._idle_since_s = self._clock()
            return False
        max_blocks = max(1, max_bytes // self._disk.form.block_bytes)
        if self._unwritten is None:
            self._runner.finish_saves()
            self._unwritten = deque(self._find_unwritten(max_blocks))
        piece: list[tuple[StoredBlock, BlockBytes]] = []
        while self._unwritten and len(piece) < max_blocks:
            block, block_id = self._unwritten.popleft()
            if (data := self._read(block, block_id)) is not None:
                piece.append((block, data))
        has_written = bool(piece) and self._disk.write(piece)
        if not has_written:
            self._idle_since_s = self._unwritten = None
        return has_written

    def write_all(self, limit_s: float) -> None:
        """As many files as there is time for, each no larger than the disk, as it was so far, takes in what is left."""
        end_s, figures = time.monotonic() + limit_s, self._disk.figures
        while (left_s := end_s - time.monotonic()) > 0:
            max_bytes = IDLE_PIECE_BYTES
            if figures.write_seconds_total:
                fitting = left_s * figures.written_bytes_total / figures.write_seconds_total
                max_bytes = int(min(LAST_PIECE_BYTES, fitting))
                if max_bytes < self._disk.form.block_bytes:
                    return
            if not self.write_piece(max_bytes):
                return

    def _find_unwritten(self, blocks_per_file: int) -> list[tuple[StoredBlock, int | None]]:
        """Of the hottest blocks that the disk has room for, those that are not there.

        One that is there takes up its whole file; what would have to push out a hotter one's is not written.
        """
        disk, form = self._disk, self._disk.form
        unwritten: dict[bytes, tuple[StoredBlock, int | None]] = {}
        files: set[Segment] = set()
        on_disk: list[bytes] = []
        num_bytes = 0
        for block, block_id in self._hottest_first():
            if block.key in unwritten:
                continue
            if (file := disk.file_of(block.key)) is None:
                num_bytes += form.file_bytes(1) if len(unwritten) % blocks_per_file == 0 else form.bytes_per_block
            elif file not in files:
                num_bytes += file.num_bytes
            if num_bytes > disk.figures.max_bytes:
                break
            if file is None:
                unwritten[block.key] = block, block_id
            else:
                files.add(file)
                on_disk.append(block.key)
        # They count as used now: what is written must not push them out.
        disk.touch(on_disk)
        return list(unwritten.values())

    def _hottest_first(self) -> Iterator[tuple[StoredBlock, int | None]]:
        """And in which block of the pool each is; None: in host memory."""
        cache = self._blocks.prefix_cache
        for block_id in self._blocks.pool.idle_newest_first():
            if (entry := cache.entry(block_id)) is not None:
                yield cache.stored_block(entry), block_id
        if self._host is not None:
            for block in self._host.newest_first():
                yield block, None

    def _read(self, block: StoredBlock, block_id: int | None) -> BlockBytes | None:
        """None when it is not there any more."""
        if block_id is not None:
            cache = self._blocks.prefix_cache
            entry = cache.entry(block_id)
            return self._runner.read_block(block_id) if entry and cache.stored_block(entry) == block else None
        return self._host.peek(block.key) if self._host is not None and self._host.holds(block) else None
