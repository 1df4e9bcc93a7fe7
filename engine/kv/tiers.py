"""The tiers behind the pool, and what is to be copied between it and them before the next step.

A block that leaves the pool is saved to host memory; a prefix that the pool has lost comes back from there, or from the
disk, as if it had been computed. Owns the copies that are due and the decision whether one is worth it, or waiting for
it; the bytes are moved by the runner (`block_transfers.py`). Knows neither sequences nor references: `block_manager.py`
calls it.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from pagedd.engine.kv.copy_costs import CopyCosts
from pagedd.engine.kv.disk_reader import DiskRead
from pagedd.engine.kv.disk_thread import STUCK_S
from pagedd.engine.kv.disk_tier import DiskTier, Forgotten
from pagedd.engine.kv.host_tier import HostTier
from pagedd.engine.kv.stored_block import BlockBytes, BlockCopy, StoredBlock, descendants, next_block
from pagedd.engine.stats import TierStats

# A disk is waited for as long as computing would take, and until it counts as stuck: it may have to wake up.
MIN_PATIENCE_S = STUCK_S


class StoredRun(NamedTuple):
    """Blocks that tiers have: each one's bytes, or None where `read` brings them; it is None without such blocks."""

    data: list[BlockBytes | None]
    read: DiskRead | None


class Tiers:
    """Host memory, and the disk behind it; either may be None.

    Args:
        lookahead: how many blocks a step may take from the pool. So many of those that will be taken next are saved
            in advance.
    """

    def __init__(self, host: HostTier | None, disk: DiskTier | None, costs: CopyCosts, *, lookahead: int = 0) -> None:
        self.host = host
        self.disk = disk
        self.costs = costs
        # Saving more than half of the slots in advance would evict what has just been saved.
        self.lookahead = min(lookahead, host.num_slots // 2) if host is not None else 0
        self._saves: list[BlockCopy] = []
        self._loads: dict[int, BlockBytes] = {}
        self._saves_left: float | None = None  # how many more are worth it in this step; None: not weighed yet

    # --- what the pool lacks ------------------------------------------------------------------------------------------

    def find_run(self, parent_key: bytes, token_blocks: Iterable[tuple[int, ...]]) -> StoredRun:
        """Unbroken run of stored blocks with these tokens behind `parent_key`. Those on the disk are read from now on.

        It ends where computing is cheaper. What lies in host memory stays valid until `settle`. If there is something
        to read, `take_read` or `give_up` follows.
        """
        data: list[BlockBytes | None] = []
        keys: list[bytes] = []
        loads_left: dict[bool, float] = {}  # by whether they come from the disk
        for token_ids in token_blocks:
            block = next_block(parent_key, token_ids)
            if self.host is not None and self.host.holds(block):
                self.host.figures.hits_total += 1
                if not self._is_worth_loading(loads_left, from_disk=False):
                    break
                data.append(self.host.read(block.key))
            elif self.disk is not None and self.disk.holds(block):
                self.disk.figures.hits_total += 1
                if not self._is_worth_loading(loads_left, from_disk=True):
                    break
                data.append(None)
            else:
                break
            keys.append(block.key)
            parent_key = block.key
        if None in data and self._is_queue_too_long(data.count(None)):
            del data[data.index(None) :]
            del keys[len(data) :]
        if self.host is not None:
            self.host.touch([key for key in keys if key in self.host])
            self.host.figures.promotions_total += len(data) - data.count(None)
        if self.disk is None:
            return StoredRun(data, None)
        self.disk.note_use(keys)
        from_disk = [key for key, one in zip(keys, data, strict=True) if one is None]
        return StoredRun(data, self.disk.start_read(from_disk) if from_disk else None)

    def is_over(self, read: DiskRead) -> bool:
        """Whether nothing more will come, or nothing that is worth waiting for."""
        return read.is_over or read.waited_s > max(MIN_PATIENCE_S, self._compute_s(len(read.places)))

    def take_read(self, read: DiskRead) -> list[BlockBytes]:
        """The bytes of as many of its blocks as came, in order. The others are to be computed."""
        if self.disk is None:
            return []
        num_read, begun_s = len(read.data), read.begun_s
        if num_read:
            self.costs.read.note(num_read, sum(read.block_seconds[:num_read]))
        elif begun_s is not None:  # the first block takes so long, and longer
            self.costs.read.note(1, time.monotonic() - begun_s)
        data = self.disk.take_read(read)
        self.disk.figures.promotions_total += len(data)
        return data

    def give_up(self, read: DiskRead) -> None:
        """Nobody wants it any more."""
        if self.disk is not None:
            self.disk.take_read(read)

    def await_reads(self, limit_s: float) -> None:
        """Until one is over, `limit_s` at most."""
        if self.disk is not None:
            self.disk.await_reads(limit_s)

    def _compute_s(self, num_blocks: int) -> float:
        """0 before it has been measured."""
        return (self.costs.compute.each or 0.0) * self.costs.block_size * num_blocks

    def _is_queue_too_long(self, num_blocks: int) -> bool:
        """Whether so many blocks would be computed before the disk even begins to read them."""
        queued_s = self.disk.num_reading_blocks * (self.costs.read.each or 0.0) if self.disk is not None else 0.0
        return queued_s > (self._compute_s(num_blocks) or MIN_PATIENCE_S)

    def _is_worth_loading(self, loads_left: dict[bool, float], *, from_disk: bool) -> bool:
        """Weighed once for a run."""
        if from_disk not in loads_left:
            loads_left[from_disk] = self.costs.max_loads(from_disk=from_disk)
            if from_disk and self.disk is not None:
                loads_left[from_disk] = min(loads_left[from_disk], self.disk.max_reads)
        loads_left[from_disk] -= 1
        return loads_left[from_disk] >= 0

    # --- copies that are due ------------------------------------------------------------------------------------------

    def load(self, block_id: int, data: BlockBytes) -> None:
        """Before the next step, `data` is to be copied into the block."""
        self._loads[block_id] = data

    def drop_load(self, block_id: int) -> None:
        """The block has been given back before that."""
        self._loads.pop(block_id, None)

    def save(self, block: StoredBlock, block_id: int) -> BlockCopy | None:
        """The copy that saves `block_id`, which holds `block`; None when it is stored already, or not worth it."""
        if self.host is None:
            return None
        if block.key in self.host:
            self.host.touch([block.key])
            return None
        if self._saves_left is None:
            self._saves_left = self.costs.max_saves()
        if self._saves_left < 1 or (memory := self.host.keep(block)) is None:
            return None
        self._saves_left -= 1
        return block_id, memory

    def save_evicted(self, block: StoredBlock, block_id: int) -> None:
        """The block is taken for something else: before the next step writes to it, it is to be saved."""
        if (copy := self.save(block, block_id)) is not None:
            self._saves.append(copy)

    def take_copies(self) -> tuple[list[BlockCopy], list[BlockCopy]]:
        """What a step has to do before it computes: saves, and loads. They are no longer due; `settle` follows."""
        saves, loads = self._saves, list(self._loads.items())
        self._saves, self._loads = [], {}
        self._saves_left = None
        return saves, loads

    def take_saves(self) -> list[BlockCopy]:
        """Saves that no step has taken with it."""
        saves, self._saves = self._saves, []
        return saves

    def settle(self, saves: Sequence[BlockCopy], loads: Sequence[BlockCopy]) -> None:
        """The step that took its copies last has made them, or they come before any that follows; but for these, which
        are due again.
        """
        self._saves[:0] = saves
        self._loads = dict(loads) | self._loads
        if self.host is not None and not self._loads:
            self.host.unpin()

    # --- contents that are wanted no more -----------------------------------------------------------------------------

    def key_of(self, digest: bytes) -> bytes | None:
        """Of a stored block that the pool's index knew by `digest`. O(blocks)."""
        return next((block.key for block in self._blocks() if block.digest == digest), None)

    def forget_from(self, keys: Iterable[bytes], others: Iterable[bytes], limit_s: float = 0.0) -> Forgotten:
        """Drops the blocks of these keys, and what continues them, whichever tier has which.

        A block of which nobody knows what it continues goes with them. `others`: of all that the pool goes on to hold.
        Returns what the disk has not let go within `limit_s`, and what else went with it.
        """
        doomed = descendants(self._blocks(), keys, others)
        if self.host is not None:
            self.host.forget(doomed)
        return self.disk.forget(doomed, limit_s) if self.disk is not None else Forgotten(0, 0)

    def _blocks(self) -> Iterator[StoredBlock]:
        if self.host is not None:
            yield from self.host.newest_first()
        if self.disk is not None:
            yield from self.disk.blocks()

    def clear(self) -> None:
        self._saves, self._loads = [], {}
        for tier in (self.host, self.disk):
            if tier is not None:
                tier.clear()

    def stats(self) -> dict[str, TierStats]:
        """Of the tiers that there are, by their names."""
        stats = {}
        if self.host is not None:
            stats["host"] = self.host.stats(self.costs)
        if self.disk is not None:
            stats["disk"] = self.disk.stats()
        return stats

    def check_integrity(self) -> None:
        if self.host is not None:
            self.host.check_integrity()
