"""The pool as a picture: one byte a block that says what to draw there, and which blocks changed since the last frame.

A pool may have a hundred thousand blocks and four frames a second, so whatever is done for every block is done by
operations on whole byte strings (`translate`, and `&` and `|` of them as one long integer); Python's loops see only the
blocks that changed. Knows no colour and no cell: `renderables/block_cells.py` draws it.
"""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

from pagedd.client.stats_frame import BlockMap
from pagedd.tui.letters import MAX_MARKS, Mark

Key = tuple[str, int]
"""A sequence: (request_id, index)."""

# Looks: what a block's byte says.
FREE = 0
CACHED = 1  # and the three after it, from used just now to used long ago
NUM_AGES = 4
SHARED = CACHED + NUM_AGES
ENDED = SHARED + 1  # used by a sequence that has just left
OWNED = ENDED  # OWNED + a mark's number

_CACHED_STATE, _USED_STATE = 1, 2
# An age of k is [2^(k−1), 2^k) seconds: under 4 s, under half a minute, under 9 minutes, older.
_AGE_BOUNDS = (3, 6, 10)
# With more blocks changed than that, drawing everything is cheaper than finding out what.
_MAX_CHANGES = 20_000


def _table(byte_of: Iterable[tuple[int, int]], otherwise: int = 0) -> bytes:
    table = bytearray([otherwise]) * 256
    for value, byte in byte_of:
        table[value] = byte
    return bytes(table)


_IS_USED = _table([(_USED_STATE, 0xFF)])
_IS_CACHED = _table([(_CACHED_STATE, 0xFF)])
_IS_SINGLE = _table([(0, 0xFF), (1, 0xFF)])
_SHARED_LOOK = _table([(0, 0), (1, 0)], otherwise=SHARED)
_AGE_LOOK = bytes(CACHED + sum(age >= bound for bound in _AGE_BOUNDS) for age in range(256))
_ANY = re.compile(rb"[^\0]")

assert OWNED + MAX_MARKS < 256


class Pool:
    """Every block's look. Mutated only by `take`.

    Attributes:
        looks: what to draw, a byte a block in physical order.
        partial: 1 where a used block has room left.
        extent: every block from this one on has been free in all frames.
        version: grows by one with each frame.
        changed: the blocks whose look changed with the last frame, in order; None is all of them.
        filled: the blocks whose `partial` changed with it, likewise.
        taken: of these, the ones that a sequence was just given.
        evicted: cached blocks whose content was just given up.
        tables: block tables, logical → physical.
    """

    def __init__(self) -> None:
        self.version = 0
        self.extent = 0
        self.block_size = 0
        self.looks = b""
        self.partial = b""
        self.ref_counts = b""
        self.fills = b""
        self.ages = b""
        self.changed: list[int] | None = None
        self.filled: list[int] | None = None
        self.taken: frozenset[int] = frozenset()
        self.evicted: frozenset[int] = frozenset()
        self.tables: dict[Key, list[int]] = {}
        self._states = b""
        self._owners = bytearray()
        self._owner_looks: dict[Key, int] = {}

    @property
    def num_blocks(self) -> int:
        return len(self.looks)

    def take(
        self,
        blocks: BlockMap,
        tables: Mapping[Key, list[int]],
        marks: Mapping[Key, Mark],
        num_cached_tokens: Mapping[Key, int],
    ) -> None:
        """Takes in a frame's map. `marks` has one for each sequence in `tables`."""
        self.version += 1
        is_new = len(blocks.states) != len(self._states)
        if is_new:
            self._owners = bytearray([ENDED]) * len(blocks.states)
            self.tables, self._owner_looks, self._states, self.extent = {}, {}, b"", 0
        taken, evicted = self._follow(blocks, tables, marks, num_cached_tokens)
        before, before_partial = self.looks, self.partial
        self._draw(blocks)
        self.extent = max(self.extent, len(self.looks.rstrip(b"\0")))
        self.changed = None if is_new else _differences(before, self.looks)
        self.filled = None if is_new else _differences(before_partial, self.partial)
        if is_new or self.changed is None:
            taken, evicted = set(), set()
        else:
            cached = range(CACHED, CACHED + NUM_AGES)
            evicted.update(block for block in self.changed if before[block] in cached and self.looks[block] == FREE)
        self.taken, self.evicted = frozenset(taken), frozenset(evicted)

    def owners(self, block: int) -> list[tuple[Key, int]]:
        """The sequences that name a block, each with its logical index."""
        return [(key, table.index(block)) for key, table in self.tables.items() if block in table]

    def count(self, state: int) -> int:
        """Blocks in a state: 0 free, 1 cached, 2 used."""
        return self._states.count(state)

    @property
    def num_shared(self) -> int:
        return self.looks.count(SHARED)

    def _draw(self, blocks: BlockMap) -> None:
        num_blocks = len(blocks.states)
        # Daemons and recordings of before these were sent have none.
        self.ages = blocks.ages if len(blocks.ages) == num_blocks else bytes(num_blocks)
        self.fills = blocks.fills if len(blocks.fills) == num_blocks else b""
        self.block_size, self.ref_counts, self._states = blocks.block_size, blocks.ref_counts, blocks.states
        used = _number(blocks.states.translate(_IS_USED))
        owned = _number(self._owners) & _number(blocks.ref_counts.translate(_IS_SINGLE)) & used
        shared = _number(blocks.ref_counts.translate(_SHARED_LOOK)) & used
        cached = _number(self.ages.translate(_AGE_LOOK)) & _number(blocks.states.translate(_IS_CACHED))
        self.looks = (owned | shared | cached).to_bytes(num_blocks, "little")
        if self.fills:
            has_room = _number(self.fills.translate(_has_room(blocks.block_size)))
            self.partial = (has_room & used).to_bytes(num_blocks, "little")
        else:
            self.partial = bytes(num_blocks)

    def _follow(
        self,
        blocks: BlockMap,
        tables: Mapping[Key, list[int]],
        marks: Mapping[Key, Mark],
        num_cached_tokens: Mapping[Key, int],
    ) -> tuple[set[int], set[int]]:
        """Brings `_owners` up to date. Returns the blocks just taken, and those of them that were evicted for it."""
        owners, states = self._owners, self._states
        looks = {key: OWNED + marks[key].number for key in tables}
        orphans: set[int] = set()
        kept: set[Key] = set()
        for key, table in self.tables.items():
            if looks.get(key) == self._owner_looks[key] and _begins_with(tables[key], table):
                kept.add(key)
            else:
                orphans.update(table)
        for block in orphans:
            owners[block] = ENDED
        taken: set[int] = set()
        evicted: set[int] = set()
        for key, table in tables.items():
            for logical in range(len(self.tables[key]) if key in kept else 0, len(table)):
                block = table[logical]
                owners[block] = looks[key]
                if states and states[block] != _USED_STATE:
                    taken.add(block)
                    was_hit = (logical + 1) * blocks.block_size <= num_cached_tokens[key]
                    if states[block] == _CACHED_STATE and not was_hit:
                        evicted.add(block)
        if orphans:
            # Whoever shared a block with a sequence that left has it alone now.
            for key, table in tables.items():
                for block in orphans.intersection(table):
                    owners[block] = looks[key]
        self.tables, self._owner_looks = dict(tables), looks
        return taken, evicted


@lru_cache(maxsize=4)
def _has_room(block_size: int) -> bytes:
    return _table((fill, 1) for fill in range(min(256, block_size)))


def _begins_with(table: list[int], known: list[int]) -> bool:
    return table == known if len(table) == len(known) else table[: len(known)] == known


def _differences(before: bytes, after: bytes) -> list[int] | None:
    """Where two equally long byte strings differ; None when it is in too many places."""
    difference = _number(before) ^ _number(after)
    if not difference:
        return []
    marked = difference.to_bytes(len(after), "little")
    if len(after) - marked.count(0) > _MAX_CHANGES:
        return None
    return [match.start() for match in _ANY.finditer(marked)]


def _number(blocks: bytes | bytearray) -> int:
    return int.from_bytes(blocks, "little")
