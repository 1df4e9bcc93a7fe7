"""One sequence of tokens on its way through the engine.

Mutated only by `Scheduler` and `BlockManager`; read by everyone.
"""

from dataclasses import dataclass, field
from enum import Enum

from pagedd.engine.kv.prefix_cache import CachedBlock
from pagedd.engine.request import FinishReason, Request

PENDING = -1  # in place of a token that a launched step draws: only the device knows it


class SequenceState(Enum):
    WAITING = "waiting"  # never started, holds no block
    RUNNING = "running"  # has a seat; prefilling or decoding
    PREEMPTED = "preempted"  # had a seat and tokens, lost its blocks, waits to be recomputed
    FINISHED = "finished"


@dataclass(slots=True, weakref_slot=True, eq=False, kw_only=True)
class Sequence:
    """One choice of one request.

    Attributes:
        token_ids: prompt, then output. The last may be `PENDING`, within a step of an engine that runs ahead.
        num_computed_tokens: KV of tokens [0, num_computed) is written; [num_computed, num_tokens) is still to compute.
        num_cached_tokens: prompt tokens that need not be computed when it starts, by pool and tiers; None before that.
        block_table: physical block of each logical block; covers at least [0, num_computed).
        block_digests: digest of the chain's root, then of the leading full blocks, as far as they are known.
        num_indexed_blocks: leading blocks whose content the prefix index knows; `last_indexed` is the last one's entry.
        due_s: virtual start time, arrival − priority × ageing; the smaller, the more urgent. See `policy.py`.
        order: running number of arrival, unique; settles ties of `due_s`.
        started_s, first_token_s: when it first could go on, with a seat and what it waited for of the disk; and when
            its first token came.
        num_recompute_tokens: tokens below this index were computed once already, before a preemption.
    """

    request: Request
    choice_index: int
    token_ids: list[int]
    num_prompt_tokens: int
    arrival_s: float
    due_s: float
    order: int
    priority: int
    state: SequenceState = SequenceState.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None
    block_table: list[int] = field(default_factory=list)
    block_digests: list[bytes] = field(default_factory=list)
    num_indexed_blocks: int = 0
    last_indexed: CachedBlock | None = None
    num_recompute_tokens: int = 0
    num_preemptions: int = 0
    started_s: float | None = None
    first_token_s: float | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """One token to compute and at least one produced: the next step yields a token."""
        num_tokens = len(self.token_ids)
        return num_tokens > self.num_prompt_tokens and num_tokens - self.num_computed_tokens == 1

    @property
    def has_all_tokens(self) -> bool:
        """As many as it may have; it ends when the last of them is known."""
        return self.num_output_tokens >= self.request.params.max_tokens

    @property
    def reason_to_finish(self) -> FinishReason | None:
        """Why its last token, a drawn one, ends it; None when it goes on."""
        params, num_output_tokens = self.request.params, len(self.token_ids) - self.num_prompt_tokens
        if self.token_ids[-1] in params.stop_token_ids and num_output_tokens > params.min_tokens:
            return "stop"
        return "length" if num_output_tokens >= params.max_tokens else None

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]
