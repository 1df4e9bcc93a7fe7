"""What a block holds, as the tiers behind the pool name it: in host memory and on the disk.

A *key* is the chained digest of `prefix_cache.py` at its full length and always by blake2b: over everything that the KV
of a block depends on, from the root's extras to its own last token. A tier compares a block's own token ids as well.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

KEY_BYTES = 32
INDEX_DIGEST_BYTES = 16

# A block's bytes, all layers, as `storage.py` has them; what is in them is its business.
BlockBytes = memoryview | bytearray
# (physical block, host memory that its bytes are copied to or from)
BlockCopy = tuple[int, BlockBytes]


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """One full block's content, as much of it as tells it from all others; what is only looked for has no more.

    Attributes:
        parent_key: the key of the block before it, or of the chain's root.
        digest: by which the pool's index knows it, and people do.
        position: how many blocks come before it.
    """

    key: bytes
    parent_key: bytes
    token_ids: tuple[int, ...]
    digest: bytes = b""
    position: int = 0


def root_key(root: bytes) -> bytes:
    """Of a chain that begins with `root`, see `PrefixCache.root_key`."""
    return blake2b(root, digest_size=KEY_BYTES).digest()


def next_block(parent_key: bytes, token_ids: Sequence[int], digest: bytes = b"", position: int = 0) -> StoredBlock:
    """The block of these tokens behind `parent_key`."""
    key = blake2b(parent_key + array("q", token_ids).tobytes(), digest_size=KEY_BYTES).digest()
    return StoredBlock(key, parent_key, tuple(token_ids), digest, position)


def descendants(blocks: Iterable[StoredBlock], roots: Iterable[bytes], others: Iterable[bytes] = ()) -> set[bytes]:
    """The keys of `roots`, and of those among `blocks` that continue one of them.

    Also of those that may: what comes before them is lost, and neither among `blocks` nor one of the keys `others`.
    """
    blocks = list(blocks)
    children: dict[bytes, list[bytes]] = {}
    for block in blocks:
        children.setdefault(block.parent_key, []).append(block.key)
    known = {block.key for block in blocks}.union(others)
    behind_gaps = {block.parent_key for block in blocks if block.position and block.parent_key not in known}
    found, unseen = set[bytes](), [*roots, *behind_gaps]
    while unseen:
        if (key := unseen.pop()) not in found:
            found.add(key)
            unseen += children.get(key, ())
    return found
