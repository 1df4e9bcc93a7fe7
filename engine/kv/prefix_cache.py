"""The index of full KV blocks by content: which block already holds the KV of a given prefix.

Owns digests and the index. Doesn't know reference counts or who uses a block (`block_pool.py`, `block_manager.py`).

A block's key is a chained digest over its parent's digest and its own token ids; the chain's root covers everything
else that the KV depends on. A hit is believed only when the token ids are equal and the parent is the very block before
it, so that even a colliding digest cannot serve another prompt's KV.
"""

from array import array
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from hashlib import blake2b

from pagedd.engine.kv.stored_block import INDEX_DIGEST_BYTES, StoredBlock, next_block, root_key

Extras = tuple[tuple[str, str], ...]
Hasher = Callable[[bytes], bytes]


def blake2b_digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=INDEX_DIGEST_BYTES).digest()


@dataclass(slots=True, eq=False)
class CachedBlock:
    """An index entry: `block_id` holds the KV of `token_ids`, preceded by what `parent` and its parents hold.

    Mutated only by `PrefixCache`.

    Attributes:
        extras: what the chain's root covers beside the namespace: caller, salt, adapter.
        children: the indexed blocks that continue it, by their block id.
        num_hits: sequences that started with it.
        stored: the same content as the tiers name it, once that has been asked for.
    """

    digest: bytes
    parent: "CachedBlock | None"
    token_ids: tuple[int, ...]
    block_id: int
    extras: Extras = ()
    children: "dict[int, CachedBlock]" = field(default_factory=dict)
    num_hits: int = 0
    stored: StoredBlock | None = None


class PrefixCache:
    """Digest → block, with token comparison.

    Args:
        namespace: (tag, value) pairs that hold for the whole cache: model, KV dtype, layout.
        hasher: bytes → digest; replaceable so that tests can force collisions.

    Attributes:
        roots: the entries that begin a prompt, by their block id.
    """

    def __init__(self, namespace: Sequence[tuple[str, str]] = (), hasher: Hasher = blake2b_digest) -> None:
        self._namespace = tuple(namespace)
        self._hasher = hasher
        self._by_digest: dict[bytes, CachedBlock] = {}
        self._by_block: dict[int, CachedBlock] = {}
        self.roots: dict[int, CachedBlock] = {}

    def __len__(self) -> int:
        return len(self._by_digest)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._by_block

    def root_digest(self, extras: Sequence[tuple[str, str]]) -> bytes:
        """Start of a chain."""
        return self._hasher(self._root(extras))

    def block_digest(self, parent_digest: bytes, token_ids: Sequence[int]) -> bytes:
        """Digest of one full block behind `parent_digest`."""
        return self._hasher(parent_digest + array("q", token_ids).tobytes())

    def find(self, digest: bytes, parent: CachedBlock | None, token_ids: tuple[int, ...]) -> CachedBlock | None:
        """The entry that holds exactly this content behind exactly this parent, else `None`."""
        entry = self._by_digest.get(digest)
        if entry is None or entry.parent is not parent or entry.token_ids != token_ids:
            return None
        return entry

    def entry(self, block_id: int) -> CachedBlock | None:
        """What `block_id` holds, when that is indexed."""
        return self._by_block.get(block_id)

    def under(self, digest: bytes) -> CachedBlock | None:
        """The entry of that digest, whatever precedes it."""
        return self._by_digest.get(digest)

    def continuing(self, keys: Set[bytes]) -> tuple[list[CachedBlock], set[bytes], set[bytes]]:
        """The entries that hold a block of `keys`, as the tiers name it, or continue one. O(index).

        An entry may have outlived some of those before it. Returns the keys of all of them as well, the lost ones'
        included, and those of all others: by those the tiers' blocks hang together.
        """
        is_behind: dict[CachedBlock, bool] = {}
        for entry in self._by_block.values():
            unseen: list[CachedBlock] = []
            each: CachedBlock | None = entry
            while each is not None and each not in is_behind:
                unseen.append(each)
                each = each.parent
            behind = each is not None and is_behind[each]
            for one in reversed(unseen):
                behind = is_behind[one] = behind or self.stored_block(one).key in keys
        found = [entry for entry, behind in is_behind.items() if behind]
        return (
            [entry for entry in found if self._by_block.get(entry.block_id) is entry],
            {self.stored_block(entry).key for entry in found},
            {self.stored_block(entry).key for entry, behind in is_behind.items() if not behind},
        )

    def stored_block(self, entry: CachedBlock) -> StoredBlock:
        """What `entry` holds, as the tiers name it."""
        unnamed = [entry]
        while unnamed[-1].stored is None and (parent := unnamed[-1].parent) is not None:
            unnamed.append(parent)
        first = unnamed.pop()
        stored = first.stored or next_block(self.root_key(entry.extras), first.token_ids, first.digest)
        first.stored = stored
        for each in reversed(unnamed):
            stored = each.stored = next_block(stored.key, each.token_ids, each.digest, stored.position + 1)
        return stored

    def root_key(self, extras: Sequence[tuple[str, str]]) -> bytes:
        """Start of a chain of keys, see `stored_block.py`."""
        return root_key(self._root(extras))

    def note_hit(self, run: Sequence[CachedBlock]) -> None:
        """A sequence starts with the blocks of `run`."""
        for entry in run:
            entry.num_hits += 1

    def insert(
        self,
        digest: bytes,
        parent: CachedBlock | None,
        token_ids: tuple[int, ...],
        block_id: int,
        extras: Extras = (),
    ) -> tuple[CachedBlock, int | None]:
        """Indexes `block_id`, whose KV is completely written.

        Returns the entry for this content and the block that lost its place, if any. Equal content that is indexed
        already keeps its entry, and `block_id` stays unindexed; an entry under the same digest whose content differs,
        or whose parent is gone, gives way.
        """
        known = self.find(digest, parent, token_ids)
        if known is not None:
            return known, None
        stale = self._by_digest.get(digest)
        if stale is not None:
            self.forget(stale.block_id)
        entry = CachedBlock(digest, parent, token_ids, block_id, extras)
        self._by_digest[digest] = self._by_block[block_id] = entry
        self._siblings(entry)[block_id] = entry
        return entry, stale.block_id if stale is not None else None

    def forget(self, block_id: int) -> bool:
        """Drops the entry of `block_id`; False when there was none."""
        entry = self._by_block.pop(block_id, None)
        if entry is None:
            return False
        del self._by_digest[entry.digest]
        self._siblings(entry).pop(block_id, None)
        return True

    def clear(self) -> None:
        self._by_digest.clear()
        self._by_block.clear()
        self.roots.clear()

    def _root(self, extras: Sequence[tuple[str, str]]) -> bytes:
        """Tags and values are length-prefixed: `("salt", "A")` never equals `("adapter", "A")`."""
        parts = []
        for text in (text for pair in (*self._namespace, *extras) for text in pair):
            encoded = text.encode()
            parts.append(len(encoded).to_bytes(4, "little") + encoded)
        return b"".join(parts)

    def _siblings(self, entry: CachedBlock) -> dict[int, CachedBlock]:
        return self.roots if entry.parent is None else entry.parent.children
