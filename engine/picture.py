"""One sequence, one block as they are shown: plain values, read from the scheduler's objects between two steps.

Changes nothing. The whole pool's picture is a few copies of bytes that `kv/block_pool.py` keeps; see `Engine.snapshot`.
"""

from collections.abc import Iterable

from pagedd.engine.kv.block_manager import BlockManager
from pagedd.engine.sequence import Sequence, SequenceState
from pagedd.engine.stats import BlockInfo, SequenceSnapshot


def shown(live: Iterable[Sequence], limit: int) -> list[Sequence]:
    """At most `limit` of `live`, in their order; those without a seat are left out first, the last to come first."""
    sequences = list(live)
    if len(sequences) <= limit:
        return sequences
    ranked = sorted(sequences, key=lambda sequence: sequence.state is not SequenceState.RUNNING)[:limit]
    return sorted(ranked, key=lambda sequence: sequence.order)


def sequence_snapshot(sequence: Sequence, now: float, num_scheduled_tokens: int) -> SequenceSnapshot:
    """`now` is the scheduler's clock."""
    state = sequence.state.value
    if sequence.state is SequenceState.RUNNING:
        state = "decode" if sequence.is_decoding else "prefill"
    first_token_s = None if sequence.first_token_s is None else sequence.first_token_s - sequence.arrival_s
    return SequenceSnapshot(
        request_id=sequence.request.request_id,
        choice_index=sequence.choice_index,
        state=state,
        priority=sequence.priority,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_cached_tokens=sequence.num_cached_tokens or 0,
        num_computed_tokens=sequence.num_computed_tokens,
        num_output_tokens=sequence.num_output_tokens,
        num_preemptions=sequence.num_preemptions,
        age_s=now - sequence.arrival_s,
        first_token_s=first_token_s,
        block_table=list(sequence.block_table),
        num_scheduled_tokens=num_scheduled_tokens,
        max_tokens=sequence.request.params.max_tokens,
        number=sequence.order,
    )


def block_info(blocks: BlockManager, live: Iterable[Sequence], index: int) -> BlockInfo:
    """Who names block `index`, and what it holds: as it is indexed, else as the sequence that fills it most says."""
    owners: list[tuple[str, int, int]] = []
    token_ids: list[int] = []
    for sequence in live:
        if index in sequence.block_table:
            logical = sequence.block_table.index(index)
            owners.append((sequence.request.request_id, sequence.choice_index, logical))
            start = logical * blocks.block_size
            written = sequence.token_ids[start : min(start + blocks.block_size, sequence.num_computed_tokens)]
            token_ids = max(token_ids, written, key=len)
    entry = blocks.prefix_cache.entry(index)
    ref_count = blocks.pool.ref_count(index)
    return BlockInfo(
        state="used" if ref_count else "cached" if blocks.pool.is_cached(index) else "free",
        ref_count=ref_count,
        owners=owners,
        token_ids=token_ids if entry is None else list(entry.token_ids),
        digest=None if entry is None else entry.digest,
        extras=() if entry is None else entry.extras,
        num_hits=0 if entry is None else entry.num_hits,
        last_use_s=blocks.pool.last_use_s(index),
    )
