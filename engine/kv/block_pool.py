"""The pool of physical KV blocks: who holds which, and in what order idle ones are given out.

Owns reference counts and one intrusive doubly linked list of idle blocks. Doesn't know tokens, sequences or tensors;
whether an idle block's content is worth keeping is told by the caller. Next: `block_manager.py`.

A block is in exactly one state:

    free     idle, content worthless      (front of the list: handed out first)
    cached   idle, content indexed        (behind the free ones, least recently used first)
    used     at least one reference, not in the list
"""

import time
from array import array
from collections.abc import Callable, Iterator

import numpy as np

from pagedd.engine.errors import IntegrityError


class Block:
    """One physical block, or the idle list's sentinel. Mutated only by `BlockPool`."""

    __slots__ = ("block_id", "is_cached", "next", "previous", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.is_cached = False  # meaningful while idle
        self.previous: Block = self
        self.next: Block = self


FREE, CACHED, USED = range(3)  # a block's state in `BlockPool.states`


class BlockPool:
    """`num_blocks` blocks of equal size. Taking, sharing and releasing are O(1) whatever the pool's size.

    Args:
        clock: seconds, monotonic; replaceable so that tests decide how old a block is.
    """

    def __init__(self, num_blocks: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, got {num_blocks}")
        self.num_blocks = num_blocks
        self.num_free = 0
        self.num_cached = 0
        self._idle = Block(num_blocks)  # sentinel: next is the first to be handed out, previous the last
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        # Kept beside the blocks, so that a picture of a large pool is a copy and delays no step.
        self._states = bytearray(num_blocks)
        self._ref_counts = bytearray(num_blocks)
        self._idle_since_s = array("d", bytes(8 * num_blocks))  # meaningful while idle
        self._clock = clock
        for block in self._blocks:
            self._insert_before(self._idle, block)
        self.num_free = num_blocks

    @property
    def num_idle(self) -> int:
        """Blocks that `take` can still hand out."""
        return self.num_free + self.num_cached

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_idle

    def ref_count(self, block_id: int) -> int:
        return self._blocks[block_id].ref_count

    def is_cached(self, block_id: int) -> bool:
        """Idle, and its content is kept for reuse."""
        block = self._blocks[block_id]
        return block.ref_count == 0 and block.is_cached

    def take(self) -> int | None:
        """Hands out the first idle block with one reference, or `None` when every block is used.

        The caller must forget a cached block's content before it writes.
        """
        block = self._idle.next
        if block is self._idle:
            return None
        self._leave_idle(block)
        self._count_references(block, 1)
        return block.block_id

    def share(self, block_id: int) -> None:
        """One more reference to a used or cached block."""
        block = self._blocks[block_id]
        if block.ref_count == 0:
            if not block.is_cached:
                raise IntegrityError(f"block {block_id} is free: its content cannot be shared")
            self._leave_idle(block)
        self._count_references(block, block.ref_count + 1)

    def release(self, block_id: int, *, keep: bool) -> None:
        """One reference less. The last one makes the block cached (`keep`) or free."""
        block = self._blocks[block_id]
        if block.ref_count == 0:
            raise IntegrityError(f"block {block_id} was released more often than it was taken")
        self._count_references(block, block.ref_count - 1)
        if block.ref_count == 0:
            self._enter_idle(block, keep)

    def discard(self, block_id: int) -> None:
        """The content of `block_id` is worth nothing any more: a cached block becomes free, a used one stays used."""
        block = self._blocks[block_id]
        if block.ref_count == 0 and block.is_cached:
            self._leave_idle(block)
            self._enter_idle(block, False)

    def idle_order(self) -> list[int]:
        """Idle blocks in the order in which `take` would hand them out."""
        order, block = [], self._idle.next
        while block is not self._idle:
            order.append(block.block_id)
            block = block.next
        return order

    def idle_newest_first(self) -> Iterator[int]:
        """The reverse of `idle_order`, one by one."""
        block = self._idle.previous
        while block is not self._idle:
            yield block.block_id
            block = block.previous

    def next_cached(self, count: int) -> list[int]:
        """Those of the next `count` blocks that `take` would hand out whose content would be lost. O(count)."""
        blocks, block = [], self._idle.next
        for _ in range(count if self.num_free < count else 0):
            if block.is_cached:
                blocks.append(block.block_id)
            block = block.next
        return blocks

    def states(self) -> bytes:
        """One byte a block in physical order: 0 free, 1 cached, 2 used."""
        return bytes(self._states)

    def ref_counts(self) -> bytes:
        """One byte a block in physical order, saturating at 255."""
        return bytes(self._ref_counts)

    def ages(self) -> bytes:
        """One byte a block in physical order: 0 for one that is cached since under a second, or not cached.

        Else k for [2^(k-1), 2^k) seconds since its last reference went.
        """
        idle_s = self._clock() - np.frombuffer(self._idle_since_s)
        # The exponent of a number below one is not positive.
        exponents = np.maximum(np.frexp(idle_s)[1], 0).astype(np.uint8)
        exponents *= np.frombuffer(self._states, np.uint8) == CACHED
        return exponents.tobytes()

    def last_use_s(self, block_id: int) -> float | None:
        """Seconds since the last reference to a cached block went; 0 for a used one, None for a free one."""
        block = self._blocks[block_id]
        if block.ref_count:
            return 0.0
        return self._clock() - self._idle_since_s[block_id] if block.is_cached else None

    def check_integrity(self) -> None:
        """Raises `IntegrityError` unless the states add up and the list holds the idle blocks, free ones first."""
        order = self.idle_order()
        idle = [self._blocks[block_id] for block_id in order]
        if len(set(order)) != len(order) or any(block.ref_count for block in idle):
            raise IntegrityError("the idle list holds a block twice, or one that is used")
        num_cached = sum(block.is_cached for block in idle)
        if any(block.is_cached for block in idle[: len(idle) - num_cached]):
            raise IntegrityError("a cached block stands before a free one")
        states = bytes(USED if block.ref_count else CACHED if block.is_cached else FREE for block in self._blocks)
        if self._states != states or self._ref_counts != bytes(min(block.ref_count, 255) for block in self._blocks):
            raise IntegrityError("the picture of the pool is not what its blocks say")
        num_used = states.count(USED)
        if (len(idle) - num_cached, num_cached, num_used) != (self.num_free, self.num_cached, self.num_used):
            raise IntegrityError(
                f"counted {len(idle) - num_cached} free, {num_cached} cached, {num_used} used; "
                f"expected {self.num_free}, {self.num_cached}, {self.num_used}"
            )

    def _count_references(self, block: Block, ref_count: int) -> None:
        block.ref_count = ref_count
        self._ref_counts[block.block_id] = min(ref_count, 255)
        self._states[block.block_id] = USED

    def _enter_idle(self, block: Block, keep: bool) -> None:
        block.is_cached = keep
        self._states[block.block_id] = CACHED if keep else FREE
        if keep:
            self._idle_since_s[block.block_id] = self._clock()
            self.num_cached += 1
            self._insert_before(self._idle, block)
        else:
            self.num_free += 1
            self._insert_before(self._idle.next, block)

    def _leave_idle(self, block: Block) -> None:
        if block.is_cached:
            self.num_cached -= 1
        else:
            self.num_free -= 1
        block.is_cached = False
        block.previous.next, block.next.previous = block.next, block.previous

    @staticmethod
    def _insert_before(successor: Block, block: Block) -> None:
        block.previous, block.next = successor.previous, successor
        successor.previous.next = block
        successor.previous = block
