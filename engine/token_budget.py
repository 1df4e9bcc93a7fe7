"""How much a step may hold: as configured, and less for a while after the device's memory ran out.

Chunks and guesses give way first, for a sequence that decodes takes least. Where they have the least already, or
decodes alone are too much, fewer of these go into a step, and take turns: nobody who runs stands still.
"""

from pagedd.engine.sequence import Sequence
from pagedd.engine.step import Step

LEAST_TOKENS = 16
# A paced engine's steps are so short that others have their turn, and answers do not come in bursts.
_PACED_STEP_S = 0.25
_CALM_STEPS = 256  # after so many steps without a fault what is allowed doubles, up to what is configured


class TokenBudget:
    """Of the next step.

    Attributes:
        tokens: in all, as configured.
        chunk_tokens: of sequences that compute more than one, in chunks or with guesses, as far as memory goes.
        num_decodes: sequences that may decode.
        is_paced: tokens are counted out, so none is for a guess that may be wrong.
    """

    def __init__(self, tokens: int, max_num_seqs: int) -> None:
        self.tokens = self.chunk_tokens = tokens
        self.num_decodes = self._max_num_seqs = max_num_seqs
        self.is_paced = False
        self._paced_tokens = tokens
        self._turn = 0
        self._num_calm_steps = 0

    def in_turn(self, decoding: list[Sequence]) -> list[Sequence]:
        """Those of `decoding` that the step may hold; the next ones come with the next step."""
        if len(decoding) <= self.num_decodes:
            return decoding
        start = self._turn % len(decoding)
        self._turn = start + self.num_decodes
        return (decoding[start:] + decoding[:start])[: self.num_decodes]

    def left(self, step: Step) -> int:
        """Tokens that chunks may still have in it."""
        return min(self.tokens - step.num_scheduled_tokens, self.for_chunks - step.num_chunk_tokens)

    @property
    def for_chunks(self) -> int:
        """Tokens of sequences that compute more than one."""
        return min(self.chunk_tokens, self._paced_tokens)

    def pace(self, tokens_per_second: float | None) -> None:
        """Chunks are no larger than what may be computed in a moment; None is without a limit."""
        self.is_paced = tokens_per_second is not None
        paced = self.tokens if tokens_per_second is None else int(tokens_per_second * _PACED_STEP_S)
        self._paced_tokens = max(LEAST_TOKENS, paced)

    def shrink(self, step: Step) -> str:
        """Memory ran out in `step`: half of it must do. Returns what holds from now on, in words."""
        self._num_calm_steps = 0
        if step.num_chunk_tokens and self.chunk_tokens > LEAST_TOKENS:
            self.chunk_tokens = min(self.chunk_tokens, max(LEAST_TOKENS, step.num_chunk_tokens // 2))
            return f"chunks and guesses have {self.chunk_tokens} tokens a step"
        num_decodes = step.num_scheduled_tokens - step.num_chunk_tokens
        self.num_decodes = min(self.num_decodes, max(1, num_decodes // 2))
        return f"{self.num_decodes} sequences decode in a step"

    def note_step(self) -> None:
        """A step came back."""
        if self.chunk_tokens == self.tokens and self.num_decodes == self._max_num_seqs:
            return
        self._num_calm_steps += 1
        if self._num_calm_steps == _CALM_STEPS:
            self.chunk_tokens = min(2 * self.chunk_tokens, self.tokens)
            self.num_decodes = min(2 * self.num_decodes, self._max_num_seqs)
            self._num_calm_steps = 0
