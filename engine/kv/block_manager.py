"""Block tables: which blocks a sequence holds, shares, copies and gives back.

Ties `BlockPool` (references) and `PrefixCache` (contents) to `Sequence.block_table`. Plain Python, no tensors: the
scheduler's simulation and its tests run on it without a model. The bytes themselves live in `storage.py`.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable

from pagedd.engine.errors import IntegrityError
from pagedd.engine.kv.block_pool import BlockPool
from pagedd.engine.kv.disk_reader import DiskRead
from pagedd.engine.kv.disk_thread import STUCK_S
from pagedd.engine.kv.open_pages import OpenPages
from pagedd.engine.kv.prefix_cache import CachedBlock, Hasher, PrefixCache, blake2b_digest
from pagedd.engine.kv.stored_block import BlockCopy, next_block
from pagedd.engine.kv.tiers import Tiers
from pagedd.engine.sequence import Sequence
from pagedd.engine.stats import Eviction


class BlockManager:
    """All KV blocks of one engine and the sequences that name them.

    Args:
        namespace: (tag, value) pairs that the KV of every block depends on; see `PrefixCache`.
        tiers: what keeps blocks that the pool evicts; they need prefix caching.
        clock: see `BlockPool`.
        open_pages: of the storage that these blocks are in.

    Attributes:
        reads: sequences that cannot go on before the disk has been read, and which of their blocks come from there.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        namespace: Iterable[tuple[str, str]] = (),
        hasher: Hasher = blake2b_digest,
        tiers: Tiers | None = None,
        clock: Callable[[], float] = time.monotonic,
        open_pages: OpenPages | None = None,
    ) -> None:
        self.open_pages = open_pages or OpenPages(0)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._clock = clock
        self.pool = BlockPool(num_blocks, clock=clock)
        self.prefix_cache = PrefixCache(tuple(namespace), hasher)
        self.tiers = tiers if enable_prefix_caching else None
        self.evictions_total = 0
        self.reads: dict[Sequence, tuple[DiskRead, list[int]]] = {}
        self._newest_launched: int | None = None
        self._held: deque[tuple[int, int]] = deque()  # (step that must finish first, block), in order of release

    def num_blocks_for(self, num_tokens: int) -> int:
        """Of a sequence with KV for so many tokens. A subclass that gives more must say in `has_room` who has them."""
        return -(-num_tokens // self.block_size)

    def find_prefix(self, sequence: Sequence) -> list[CachedBlock]:
        """The unbroken run of cached blocks from block 0 that holds the start of `sequence`.

        At least one token is always left to compute, since the last token's logits are wanted.
        """
        if not self.enable_prefix_caching:
            return []
        size = self.block_size
        run: list[CachedBlock] = []
        parent: CachedBlock | None = None
        for i in range((sequence.num_tokens - 1) // size):
            token_ids = tuple(sequence.token_ids[i * size : (i + 1) * size])
            entry = self.prefix_cache.find(self.digest(sequence, i), parent, token_ids)
            if entry is None:
                break
            run.append(entry)
            parent = entry
        return run

    def digest(self, sequence: Sequence, logical: int) -> bytes:
        """Of the full block `logical` of `sequence` and all before it; see `PrefixCache`."""
        digests = sequence.block_digests
        if not digests:
            digests.append(self.prefix_cache.root_digest(sequence.request.cache_extras))
        size = self.block_size
        for i in range(len(digests) - 1, logical + 1):
            digests.append(self.prefix_cache.block_digest(digests[i], sequence.token_ids[i * size : (i + 1) * size]))
        return digests[logical + 1]

    def num_idle_after(self, prefix: list[CachedBlock]) -> int:
        """Blocks that could still be taken once `prefix` is attached: its idle blocks are idle no more."""
        return self.pool.num_idle - sum(self.pool.ref_count(entry.block_id) == 0 for entry in prefix)

    def attach(self, sequence: Sequence, prefix: list[CachedBlock]) -> None:
        """Starts the block table of `sequence` with a run that `find_prefix` returned, and what tiers have after it.

        What has to be read from the disk first is among `reads`, until `take_reads` or `release`.
        """
        if sequence.block_table:
            raise IntegrityError(f"{sequence.request.request_id} holds blocks already")
        for entry in prefix:
            self.pool.share(entry.block_id)
        sequence.block_table = [entry.block_id for entry in prefix]
        from_disk = self._attach_stored(self.tiers, sequence, prefix) if self.tiers is not None else []
        sequence.num_computed_tokens = [*from_disk, len(sequence.block_table)][0] * self.block_size
        sequence.num_indexed_blocks = len(prefix)
        sequence.last_indexed = prefix[-1] if prefix else None

    def note_start(self, sequence: Sequence) -> None:
        """It begins with what it has: the blocks of its prefix that the pool had are hit. What tiers had counts when it
        is indexed.
        """
        entries = map(self.prefix_cache.entry, sequence.block_table[: sequence.num_indexed_blocks])
        self.prefix_cache.note_hit([entry for entry in entries if entry is not None])

    def take_reads(self) -> list[Sequence]:
        """The sequences that need not wait for the disk any more: they go on from as far as it was read."""
        if self.tiers is None:
            return []
        over = [sequence for sequence, (read, _) in self.reads.items() if self.tiers.is_over(read)]
        for sequence in over:
            read, logical_blocks = self.reads.pop(sequence)
            data = self.tiers.take_read(read)
            for logical, one in zip(logical_blocks, data, strict=False):
                self.tiers.load(sequence.block_table[logical], one)
            end = [*logical_blocks, len(sequence.block_table)][len(data)]
            for block_id in sequence.block_table[end:]:
                self.tiers.drop_load(block_id)
            sequence.num_computed_tokens = end * self.block_size
        return over

    def await_reads(self, limit_s: float) -> None:
        """While nothing can be computed: until a sequence need not wait for the disk any more, `limit_s` at most."""
        if self.reads and self.tiers is not None:
            self.tiers.await_reads(limit_s)

    def has_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether `grow(sequence, num_tokens)` would take nothing: as most decodes find it, so asked first."""
        is_in_table = num_tokens <= len(sequence.block_table) * self.block_size
        return is_in_table and (sequence.request.params.n == 1 or self._shared_tail(sequence) is None)

    def num_missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that `grow(sequence, num_tokens)` would take, a copy of a shared tail included."""
        return self._num_new_blocks(sequence, num_tokens) + (self._shared_tail(sequence) is not None)

    def grow(self, sequence: Sequence, num_tokens: int) -> list[tuple[int, int]] | None:
        """Makes room to write KV for tokens [num_computed, num_tokens) of `sequence`.

        Returns the (source, destination) copies that must be done first: a tail block that other sequences share is
        copied before it is written. `None`, and nothing has changed, when the pool has too few idle blocks.
        """
        num_new, tail = self._num_new_blocks(sequence, num_tokens), self._shared_tail(sequence)
        if num_new + (tail is not None) > self.pool.num_idle:
            return None
        copies = []
        if tail is not None:
            source = sequence.block_table[tail]
            sequence.block_table[tail] = self._take()
            copies.append((source, sequence.block_table[tail]))
            self._release(source)
        sequence.block_table += [self._take() for _ in range(num_new)]
        return copies

    def index_full_blocks(self, sequence: Sequence) -> None:
        """Enters the blocks of `sequence` that are now completely written into the prefix index."""
        size = self.block_size
        num_full = sequence.num_computed_tokens // size
        if num_full == sequence.num_indexed_blocks or not self.enable_prefix_caching:
            return
        for i in range(sequence.num_indexed_blocks, num_full):
            token_ids = tuple(sequence.token_ids[i * size : (i + 1) * size])
            entry, displaced = self.prefix_cache.insert(
                self.digest(sequence, i),
                sequence.last_indexed,
                token_ids,
                sequence.block_table[i],
                sequence.request.cache_extras,
            )
            if displaced is not None:
                self.pool.discard(displaced)
            if sequence.num_recompute_tokens < (i + 1) * size <= (sequence.num_cached_tokens or 0):
                self.prefix_cache.note_hit([entry])  # it began with what a tier had
            sequence.last_indexed = entry
            sequence.num_indexed_blocks = i + 1

    def close_full_blocks(self, sequence: Sequence, start: int) -> None:
        """After tokens from `start` on were computed and taken: full blocks need no page of open keys any more."""
        first, end = start // self.block_size, sequence.num_computed_tokens // self.block_size
        for logical in range(first, end):
            self.open_pages.close(sequence.block_table[logical])

    def close_unwritten_blocks(self, sequence: Sequence) -> None:
        """Of a step that was given up: blocks behind the last computed token need a page when they are written to."""
        for block_id in sequence.block_table[-(-sequence.num_computed_tokens // self.block_size) :]:
            self.open_pages.close(block_id)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Gives `child`, which starts with the same computed tokens, every block of `parent`."""
        for block_id in parent.block_table:
            self.pool.share(block_id)
        child.block_table = list(parent.block_table)
        child.num_computed_tokens = parent.num_computed_tokens
        child.num_indexed_blocks = parent.num_indexed_blocks
        child.last_indexed = parent.last_indexed
        child.block_digests = list(parent.block_digests)

    def release(self, sequence: Sequence) -> None:
        """Gives back every block of `sequence`. Reversed, so that a prompt's tail is evicted before its head."""
        if self.tiers is not None and sequence in self.reads:
            self.tiers.give_up(self.reads.pop(sequence)[0])
        for block_id in reversed(sequence.block_table):
            if self.tiers is not None:
                self.tiers.drop_load(block_id)
            if self._newest_launched is None:
                self._release(block_id)
            else:
                self._held.append((self._newest_launched, block_id))
        sequence.block_table = []
        sequence.num_computed_tokens = 0
        sequence.num_indexed_blocks = 0
        sequence.last_indexed = None

    def saves_between_steps(self) -> list[BlockCopy]:
        """Copies to host memory: those that no step has made yet, and of blocks that will be evicted next."""
        if self.tiers is None:
            return []
        copies = self.tiers.take_saves()
        for block_id in self.pool.next_cached(self.tiers.lookahead):
            entry = self.prefix_cache.entry(block_id)
            if entry is not None and (copy := self.tiers.save(self.prefix_cache.stored_block(entry), block_id)):
                copies.append(copy)
        return copies

    def hold_releases(self, step: int) -> None:
        """Step `step` is on its way and may write to any block it names: none returns to the pool before it is back."""
        self._newest_launched = step

    def step_finished(self, step: int) -> None:
        """Gives the pool what was released before `step` or an earlier one had finished."""
        if self._newest_launched == step:
            self._newest_launched = None
        while self._held and self._held[0][0] <= step:
            self._release(self._held.popleft()[1])

    def distrust(self, sequence: Sequence) -> None:
        """Takes what `sequence` computed out of the index: its numbers are broken, and nobody may begin with them.

        With tiers, what it began with may have come from one, and goes as well, with all that continues it: a block
        that outlives those before it would be found again in a tier.
        """
        if self.tiers is None:
            num_trusted = (sequence.num_cached_tokens or 0) // self.block_size
            for block_id in sequence.block_table[num_trusted:]:
                self.prefix_cache.forget(block_id)
            return
        size, keys = self.block_size, [self.prefix_cache.root_key(sequence.request.cache_extras)]
        for start in range(0, sequence.num_tokens // size * size, size):
            keys.append(next_block(keys[-1], sequence.token_ids[start : start + size]).key)
        entries, continuing, others = self.prefix_cache.continuing(set(keys[1:]))
        for entry in entries:
            self.pool.discard(entry.block_id)
            self.prefix_cache.forget(entry.block_id)
        self.tiers.forget_from(continuing.union(keys[1:]), others)

    def num_freed_by(self, sequence: Sequence, given_back: Counter[int]) -> int:
        """Blocks that would become idle if `sequence` gave its own back after others did.

        `given_back` counts the references of those others, block by block, and then those of `sequence` too.
        """
        given_back.update(sequence.block_table)
        return sum(given_back[block_id] == self.pool.ref_count(block_id) for block_id in sequence.block_table)

    def num_live_tokens(self, running: Iterable[Sequence]) -> int:
        """Tokens with KV in used blocks, a shared block's once. O(sequences): only tails are not full."""
        tails = self._tails(running)
        return (self.pool.num_used - len(tails)) * self.block_size + sum(tails.values())

    def fills(self, running: Iterable[Sequence]) -> bytes:
        """Slots with a token's KV, one byte a block in physical order, saturating at 255; of a free block 0."""
        full = min(self.block_size, 255)
        fills = bytearray(self.pool.states().translate(bytes([0, full, full]) + bytes(253)))
        for block_id, filled in self._tails(running).items():
            fills[block_id] = min(filled, 255)
        return bytes(fills)

    def evict(self, digest: bytes) -> Eviction | None:
        """Frees the idle blocks of the prefix that ends in the block of `digest`, and of all that continues it.

        Tiers forget them too. None when neither the index nor a tier has that digest.
        """
        key: bytes | None = None
        if (head := self.prefix_cache.under(digest)) is not None:
            key = self.prefix_cache.stored_block(head).key
        elif self.tiers is not None:
            key = self.tiers.key_of(digest)
        if key is None:
            return None
        entries, keys, others = self.prefix_cache.continuing({key})
        on_disk = self.tiers.forget_from({key, *keys}, others, STUCK_S) if self.tiers is not None else None
        num_freed = num_kept = 0
        for entry in entries:
            if self.pool.is_cached(entry.block_id):
                self.pool.discard(entry.block_id)
                self.prefix_cache.forget(entry.block_id)
                num_freed += 1
            else:
                num_kept += 1
        return Eviction(num_freed, num_kept, *(on_disk or ()))

    def reset(self) -> None:
        """Forgets every content and reference. Only for an engine without a live sequence."""
        for block_id in range(self.pool.num_blocks):
            self.open_pages.close(block_id)
        self.pool = BlockPool(self.pool.num_blocks, clock=self._clock)
        self.prefix_cache.clear()
        if self.tiers is not None:
            self.tiers.clear()
        self.reads.clear()
        self._held.clear()
        self._newest_launched = None

    def check_integrity(self, live: Iterable[Sequence]) -> None:
        """Raises `IntegrityError` unless pool, index and the block tables of all `live` sequences agree."""
        self.pool.check_integrity()
        references: Counter[int] = Counter(block_id for _, block_id in self._held)
        for sequence in live:
            references.update(sequence.block_table)
            if len(sequence.block_table) * self.block_size < sequence.num_computed_tokens:
                raise IntegrityError(f"{sequence.request.request_id}: computed tokens lie outside its block table")
        if not all(sequence.block_table for sequence in self.reads):
            raise IntegrityError("the disk is read for a sequence that holds no blocks")
        for block_id in range(self.pool.num_blocks):
            if references[block_id] != self.pool.ref_count(block_id):
                raise IntegrityError(
                    f"block {block_id} has {self.pool.ref_count(block_id)} references, block tables name it "
                    f"{references[block_id]} times"
                )
            if self.pool.is_cached(block_id) and block_id not in self.prefix_cache:
                raise IntegrityError(f"block {block_id} is cached but not indexed")
            if not references[block_id] and not self.pool.is_cached(block_id) and block_id in self.prefix_cache:
                raise IntegrityError(f"block {block_id} is free but indexed")
        if self.tiers is not None:
            self.tiers.check_integrity()

    def _tails(self, running: Iterable[Sequence]) -> dict[int, int]:
        """The used blocks that are not full, and how many slots of each are filled. O(sequences)."""
        tails: dict[int, int] = {}
        for sequence in running:
            num_full = sequence.num_computed_tokens // self.block_size
            for logical, block_id in enumerate(sequence.block_table[num_full:], num_full):
                filled = max(0, sequence.num_computed_tokens - logical * self.block_size)
                tails[block_id] = max(tails.get(block_id, 0), filled)
        return tails

    def _num_new_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        return max(0, self.num_blocks_for(num_tokens) - len(sequence.block_table))

    def _shared_tail(self, sequence: Sequence) -> int | None:
        """Logical index of the partly written block when another sequence names it too: only choices share one."""
        if sequence.request.params.n == 1:
            return None
        logical, filled = divmod(sequence.num_computed_tokens, self.block_size)
        if filled and self.pool.ref_count(sequence.block_table[logical]) > 1:
            return logical
        return None

    def _take(self) -> int:
        block_id = self.pool.take()
        if block_id is None:
            raise IntegrityError("a block was taken from an empty pool")
        if (entry := self.prefix_cache.entry(block_id)) is not None:
            if self.tiers is not None:
                self.tiers.save_evicted(self.prefix_cache.stored_block(entry), block_id)
            self.prefix_cache.forget(block_id)
            self.evictions_total += 1
        return block_id

    def _attach_stored(self, tiers: Tiers, sequence: Sequence, prefix: list[CachedBlock]) -> list[int]:
        """Adds blocks that will be filled with what tiers have of `sequence` after `prefix`. They are indexed once a
        step that comes after that is back. Returns which of its blocks the disk has to be read for.
        """
        size, start = self.block_size, len(prefix)
        if prefix:
            parent_key = self.prefix_cache.stored_block(prefix[-1]).key
        else:
            parent_key = self.prefix_cache.root_key(sequence.request.cache_extras)
        end = min((sequence.num_tokens - 1) // size, start + self.pool.num_idle)
        token_blocks = (tuple(sequence.token_ids[i * size : (i + 1) * size]) for i in range(start, end))
        data, read = tiers.find_run(parent_key, token_blocks)
        from_disk = [logical for logical, one in enumerate(data, start) if one is None]
        for one in data:
            sequence.block_table.append(self._take())
            if one is not None:
                tiers.load(sequence.block_table[-1], one)
        if read is not None:
            self.reads[sequence] = read, from_disk
        return from_disk

    def _release(self, block_id: int) -> None:
        self.pool.release(block_id, keep=block_id in self.prefix_cache)
        if self.pool.ref_count(block_id) == 0:
            self.open_pages.close(block_id)
