"""The prefix index as a tree for people: runs of blocks without a branch, most recently used first.

Reads `PrefixCache` and `BlockPool` and changes nothing. Bounded by the caller; a run costs one look a block.
"""

import heapq
from dataclasses import dataclass

from pagedd.engine.kv.block_pool import BlockPool
from pagedd.engine.kv.prefix_cache import CachedBlock, Extras, PrefixCache


@dataclass(slots=True, kw_only=True)
class PrefixRun:
    """A run of indexed blocks, each the only continuation of the one before.

    Attributes:
        digest: of its first block. `parent` is the run that it continues, None at the beginning of a prompt.
        depth: blocks before it.
        num_hits, last_use_s: of its first block; 0 s while that is used.
        state: used, cached, or mixed when its end is idle and its beginning is not.
        extras: what sequences must have in common to share it.
        token_ids: of its first block.
    """

    digest: bytes
    parent: bytes | None
    depth: int
    num_blocks: int
    num_hits: int
    last_use_s: float
    state: str
    extras: Extras
    token_ids: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class PrefixTree:
    """At most as many runs as were asked for, a parent before its children. `num_blocks` counts all that is indexed."""

    runs: list[PrefixRun]
    num_blocks: int
    is_cut: bool


def prefix_tree(cache: PrefixCache, pool: BlockPool, limit: int) -> PrefixTree:
    """The `limit` most recently used runs that can still be hit, in depth-first order."""
    runs: list[PrefixRun] = []
    # Last in, first out: the least recently used lies at the bottom.
    pending: list[tuple[CachedBlock, bytes | None, int]] = [
        (root, None, 0) for root in _newest_first(pool, cache.roots, limit + 1)[::-1]
    ]
    while pending and len(runs) < limit:
        head, parent, depth = pending.pop()
        tail, num_blocks = head, 1
        while len(tail.children) == 1:
            (tail,) = tail.children.values()
            num_blocks += 1
        runs.append(
            PrefixRun(
                digest=head.digest,
                parent=parent,
                depth=depth,
                num_blocks=num_blocks,
                num_hits=head.num_hits,
                last_use_s=pool.last_use_s(head.block_id) or 0.0,
                state=_state(pool, head, tail),
                extras=head.extras,
                token_ids=head.token_ids,
            )
        )
        for child in _newest_first(pool, tail.children, limit + 1 - len(runs))[::-1]:
            pending.append((child, head.digest, depth + num_blocks))
    return PrefixTree(runs=runs, num_blocks=len(cache), is_cut=bool(pending))


def _newest_first(pool: BlockPool, entries: dict[int, CachedBlock], limit: int) -> list[CachedBlock]:
    return heapq.nsmallest(limit, entries.values(), key=lambda entry: pool.last_use_s(entry.block_id) or 0.0)


def _state(pool: BlockPool, head: CachedBlock, tail: CachedBlock) -> str:
    """Whoever uses a block uses all before it, so the two ends tell."""
    if pool.ref_count(tail.block_id):
        return "used"
    return "mixed" if pool.ref_count(head.block_id) else "cached"
