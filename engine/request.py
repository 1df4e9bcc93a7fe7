"""What goes into the engine and what comes out: token ids, never text. No torch, so that the front can read it."""

from dataclasses import dataclass, field
from typing import Literal

from pagedd.engine.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt and how to continue it.

    Attributes:
        request_id: unique among live requests.
        prompt_token_ids: at least one id, all inside the vocabulary.
        priority: −100 … 100, higher is more urgent.
        cache_extras: (tag, value) pairs that two requests must share to share cached blocks: caller, salt, adapter.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_extras: tuple[tuple[str, str], ...] = ()


@dataclass(slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one position, of the raw logits. `top` is best first: (token id, logprob)."""

    logprob: float
    top: list[tuple[int, float]] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Preemption:
    """A sequence lost seat and blocks in favour of another, which wanted `for_what`: a seat or blocks."""

    request_id: str
    choice_index: int
    by_request_id: str
    for_what: Literal["seat", "blocks"]


@dataclass(slots=True, kw_only=True)
class SequenceOutput:
    """What one step did for one choice. `finish_reason` marks the last output of that choice, and only that.

    Attributes:
        token_ids: new tokens, in order; the id that ended the sequence is included.
        logprobs: one per new token when asked for, else None.
        stop_token_id: the id that ended it, when `finish_reason` is `stop`.
        num_cached_tokens: prompt tokens served from the prefix cache, set once they are known.
        queue_s: seconds from arrival in the engine to the first scheduled chunk; on a choice's first output only.
        error_code, error_message: set when `finish_reason` is `error`.
    """

    request_id: str
    choice_index: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    queue_s: float | None = None
    error_code: str | None = None
    error_message: str | None = None

    def append(self, later: "SequenceOutput") -> None:
        """Takes in what the same step did next for the same choice."""
        self.token_ids += later.token_ids
        if later.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *later.logprobs]
        self.finish_reason, self.stop_token_id = later.finish_reason, later.stop_token_id
        self.error_code, self.error_message = later.error_code, later.error_message
