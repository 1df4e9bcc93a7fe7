"""Every figure that pagedd shows about its engine, defined once, in words. No torch.

* **KV usage** = used blocks / total blocks. A block is *free* (nothing worth keeping), *cached* (no live sequence uses
  it, its content is indexed) or *used* (at least one live sequence names it); the three add up to the total.
* **Slot fill** = live tokens / (used blocks × block size). A shared block's tokens count once.
* **Fragmentation** = 1 − slot fill. **Contiguous fragmentation** = what one slab of `max_model_len` tokens for each
  running sequence would waste for the same tokens.
* **Hit rate** = cached tokens / looked-up prompt tokens, counted once per request, when its blocks are attached.
  Tokens recomputed after a preemption count apart (`recomputed_tokens_total`).
* **Acceptance** = accepted / drafted tokens: guesses at a sequence's next tokens that were what was drawn.
* **Tiers**: what stands behind the pool, `host` (memory) and `disk`. A block that is looked up and found there is a
  *hit*; one that is then copied into the pool, instead of computed, is a *promotion*, and its tokens count as cached.
* **Batch occupancy** = running / `max_num_seqs` (seats), and scheduled tokens / token budget of the last step.
* **Awaiting a prefix** = of those that wait, the sequences whose prefix another one is computing: seats and
  blocks would not help them.
* **Token budget** = tokens that a step may compute now: `max_num_batched_tokens`, and fewer for a while after the
  device's memory ran out in one.
"""

from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(slots=True, kw_only=True)
class TierStats:
    """One tier behind the pool. Bytes and seconds of its copies; of the disk, of its files, checksums included.

    Attributes:
        num_blocks, num_bytes: that it holds now; on the disk, files of other models count as bytes.
        hits_total, promotions_total: blocks; see above.
        stored_total, evictions_total: blocks that came in, and that had to leave for others.
    """

    num_blocks: int = 0
    num_bytes: int = 0
    max_bytes: int = 0
    hits_total: int = 0
    promotions_total: int = 0
    stored_total: int = 0
    evictions_total: int = 0
    read_bytes_total: int = 0
    written_bytes_total: int = 0
    read_seconds_total: float = 0.0
    write_seconds_total: float = 0.0


@dataclass(slots=True, kw_only=True)
class EngineStats:
    """Counters since the engine started (`…_total`) and gauges of this moment. Cheap: built after every step.

    `step_seconds` sums each part of all steps: schedule, prepare, forward, sample, commit. `kv_tiers` are those that
    there are, `host` and `disk`.
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks_free: int = 0
    num_blocks_cached: int = 0
    num_blocks_used: int = 0
    num_live_tokens: int = 0
    num_requests_running: int = 0
    num_requests_waiting: int = 0
    num_requests_awaiting_prefix: int = 0
    oldest_wait_s: float = 0.0
    num_scheduled_tokens: int = 0
    token_budget: int = 0
    steps_total: int = 0
    preemptions_total: int = 0
    prefix_queries_total: int = 0
    prefix_hits_total: int = 0
    recomputed_tokens_total: int = 0
    evictions_total: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    drafted_tokens_total: int = 0
    accepted_tokens_total: int = 0
    integrity_alarms_total: int = 0
    step_seconds: dict[str, float] = field(default_factory=dict)
    kv_tiers: dict[str, TierStats] = field(default_factory=dict)

    @property
    def num_requests_wanting_room(self) -> int:
        """Those that wait for a seat, blocks or their turn."""
        return self.num_requests_waiting - self.num_requests_awaiting_prefix

    @property
    def kv_usage(self) -> float:
        return self.num_blocks_used / self.num_blocks if self.num_blocks else 0.0

    @property
    def slot_fill(self) -> float | None:
        slots = self.num_blocks_used * self.block_size
        return self.num_live_tokens / slots if slots else None

    @property
    def fragmentation(self) -> float | None:
        fill = self.slot_fill
        return None if fill is None else 1.0 - fill

    @property
    def contiguous_fragmentation(self) -> float | None:
        slots = self.num_requests_running * self.max_model_len
        return 1.0 - min(1.0, self.num_live_tokens / slots) if slots else None

    @property
    def hit_rate(self) -> float | None:
        return self.prefix_hits_total / self.prefix_queries_total if self.prefix_queries_total else None


@dataclass(slots=True, kw_only=True)
class SequenceSnapshot:
    """One live sequence. `state` is waiting, prefill, decode or preempted; `block_table` is logical → physical.

    `num_scheduled_tokens` are those that the last step computed for it; `number` counts sequences by arrival.
    """

    request_id: str
    choice_index: int
    state: str
    priority: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    num_preemptions: int
    age_s: float
    first_token_s: float | None
    block_table: list[int]
    num_scheduled_tokens: int = 0
    max_tokens: int | None = None
    number: int = 0


@dataclass(slots=True, kw_only=True)
class EngineSnapshot:
    """Every block and the sequences (see `Engine.snapshot`) at one instant, between two steps.

    `block_states[i]`: 0 free, 1 cached, 2 used. `block_ref_counts[i]` saturates at 255, as does `block_fills[i]`, the
    slots with a token's KV. `block_ages[i]`: 0 for a block that is cached since under a second, or not cached; else k
    for [2^(k-1), 2^k) seconds.
    """

    stats: EngineStats
    block_states: bytes
    block_ref_counts: bytes
    sequences: list[SequenceSnapshot]
    block_fills: bytes = b""
    block_ages: bytes = b""


@dataclass(slots=True, kw_only=True)
class BlockInfo:
    """One block at one moment, with what it holds.

    Attributes:
        owners: (request id, choice index, logical index) of the live sequences that name it.
        token_ids: what its filled slots hold.
        digest: None unless its content is indexed; `extras` is then what sequences must have in common to share it.
        last_use_s: seconds since the last sequence let go of it; 0 while it is used, None while it is free.
    """

    state: str
    ref_count: int
    owners: list[tuple[str, int, int]]
    token_ids: list[int]
    digest: bytes | None
    extras: tuple[tuple[str, str], ...]
    num_hits: int
    last_use_s: float | None


class Eviction(NamedTuple):
    """What became of an evicted prefix: blocks that are free now, those that stay since live sequences use them, those
    in files that the disk has not removed, which the next start finds again if they stay, and those of other prefixes
    that went since they lay in the same files.
    """

    num_freed: int
    num_kept: int
    num_left_on_disk: int = 0
    num_beside_on_disk: int = 0
