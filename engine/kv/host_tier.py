"""Host memory behind the pool: blocks that it evicted, or is about to, least recently used out first.

Owns slots of equal size and which content lies in which. Copies nothing: it hands out the memory of a slot, and
`tiers.py` says what is to be copied there or from there. No torch: where the memory comes from (pinned, where there is
a GPU) is the caller's business.

On a machine without a GPU this is the same RAM as the pool's: it keeps no more than a larger pool would, except that it
costs attention nothing. It is of use there as what stands before the disk tier, and for a pool that has to stay small.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from pagedd.engine.errors import IntegrityError
from pagedd.engine.kv.copy_costs import CopyCosts
from pagedd.engine.kv.stored_block import StoredBlock
from pagedd.engine.stats import TierStats


class HostTier:
    """Slots in `memory`, as many blocks of `block_bytes` as fit."""

    def __init__(self, memory: memoryview, block_bytes: int) -> None:
        self.num_slots = len(memory) // block_bytes
        self.figures = TierStats(max_bytes=self.num_slots * block_bytes)
        self._memory = memory
        self._block_bytes = block_bytes
        self._free = list(range(self.num_slots))
        self._slots: OrderedDict[bytes, tuple[int, StoredBlock]] = OrderedDict()  # least recently used first
        self._pinned: set[bytes] = set()
        self._retired: list[int] = []  # of pinned blocks that were forgotten; free once nobody reads them

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots

    def holds(self, block: StoredBlock) -> bool:
        """Exactly this content, token by token."""
        found = self._slots.get(block.key)
        return found is not None and found[1].token_ids == block.token_ids

    def read(self, key: bytes) -> memoryview:
        """A slot's memory, valid until `unpin`: the slot is not given to another block before that."""
        self._pinned.add(key)
        return self.peek(key)

    def peek(self, key: bytes) -> memoryview:
        """A slot's memory, valid until the next `keep`."""
        index, _ = self._slots[key]
        return self._memory[index * self._block_bytes : (index + 1) * self._block_bytes]

    def unpin(self) -> None:
        """What `read` gave out has been copied, or its copy comes before any that follows."""
        self._pinned.clear()
        self._free += self._retired
        self._retired.clear()

    def touch(self, keys: Sequence[bytes]) -> None:
        """A run was used. Its head lasts longest: without it the rest is worth nothing."""
        for key in reversed(keys):
            self._slots.move_to_end(key)

    def keep(self, block: StoredBlock) -> memoryview | None:
        """The memory that the bytes of `block` are to be copied to, in place of what was used least recently.

        None when all slots are pinned.
        """
        if not self._free:
            oldest = next((key for key in self._slots if key not in self._pinned), None)
            if oldest is None:
                return None
            self.forget([oldest])
            self.figures.evictions_total += 1
        self._slots[block.key] = (self._free.pop(), block)
        self.figures.stored_total += 1
        return self.peek(block.key)

    def forget(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            if (found := self._slots.pop(key, None)) is not None:
                (self._retired if key in self._pinned else self._free).append(found[0])

    def clear(self) -> None:
        self.forget(list(self._slots))

    def newest_first(self) -> list[StoredBlock]:
        return [block for _, block in reversed(self._slots.values())]

    def stats(self, costs: CopyCosts) -> TierStats:
        """`costs` are those of the copies to the pool, whichever tier they come from, and from it to here."""
        own_share = min(1.0, self.figures.promotions_total / costs.load.total) if costs.load.total else 0.0
        return replace(
            self.figures,
            num_blocks=len(self._slots),
            num_bytes=len(self._slots) * self._block_bytes,
            read_bytes_total=self.figures.promotions_total * self._block_bytes,
            written_bytes_total=costs.save.total * self._block_bytes,
            read_seconds_total=own_share * costs.load.total_s,
            write_seconds_total=costs.save.total_s,
        )

    def check_integrity(self) -> None:
        """Raises `IntegrityError` unless every slot is free or holds one block."""
        slots = [*self._free, *self._retired, *(index for index, _ in self._slots.values())]
        if sorted(slots) != list(range(self.num_slots)):
            raise IntegrityError("a slot of host memory is lost, or holds two blocks")
        if any(key != block.key for key, (_, block) in self._slots.items()):
            raise IntegrityError("a slot of host memory is listed under another key than its block's")
