"""Guesses at a sequence's next tokens, taken from its own text (prompt lookup, Saxena 2023).

Text repeats itself: names, code, quotations, loops. The tokens that followed the last occurrence of the latest few are
computed together with the next one, and what the sampler would not have drawn itself is thrown away. So the answer is
the same, greedy or not: a draw is a function of logits, seed and position alone. But for rounding: attention sums
several rows of a sequence in another order than one, and a near tie may fall the other way. Owns what is guessed, how
much, and which of the draws behind guesses count. Which sequences have room for guesses, and what becomes of a token,
is `scheduler.py`'s.

What a guess costs depends on the company. A step of one or two sequences waits for the weights, and a few more rows are
almost free. A full batch pays for each row, though less than for a sequence's first (its keys and values are read
once for all of its rows), so there one token is guessed where three repeat, and more as guesses come true.
"""

import sys
from weakref import WeakKeyDictionary

from pagedd.engine.sequence import Sequence
from pagedd.engine.step import Sampled

_LONG, _SHORT = 3, 2  # tokens that must have occurred before; the longer match is tried first
_FIRST_LENGTH = 3
_MAX_FREE_GUESSERS = 2  # so many sequences that decode leave rows to spare
_MAX_INDEXED_TOKENS = 2048  # of a history: its memory, and the time of its first look, stay small
_PAUSE_TOKENS = 16  # how many tokens a sequence draws alone after a guess of one failed


class PromptLookup:
    """Drafts for every sequence that asks for them, of a length that follows their success.

    Args:
        max_tokens: longest draft; 0 drafts nothing.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._histories: WeakKeyDictionary[Sequence, _History] = WeakKeyDictionary()

    def propose(self, sequence: Sequence, limit: int, num_decoding: int) -> list[int]:
        """At most `limit` tokens that may follow; empty when nothing similar came before or guessing does not pay.

        Args:
            num_decoding: the sequences that decode in this step, this one included.
        """
        if min(self._max_tokens, limit) < 1 or sequence.request.params.needs_token_counts:
            return []  # penalties depend on the tokens before, guessed ones included
        history = self._histories.get(sequence)
        if history is None:
            history = self._histories[sequence] = _History(min(_FIRST_LENGTH, self._max_tokens))
        history.read(sequence.token_ids)
        if sequence.num_tokens < history.paused_until:
            return []
        if num_decoding <= _MAX_FREE_GUESSERS:
            return history.continuation(sequence.token_ids, min(history.length, limit))
        proven = min(history.length, 2 * history.num_proven + 1)
        return history.continuation(sequence.token_ids, min(proven, limit), sizes=(_LONG,))

    def verify(self, sequence: Sequence, draft: list[int], draws: list[Sampled]) -> list[Sampled]:
        """The draws that count: the first, and each behind a guess that is what had been drawn just before it.

        Such a guess's KV is right, and the row of logits behind it as well. None count when the first is broken: a
        guess may be what broke the logits, so the sequence draws alone from then on.

        Args:
            draws: one behind the sequence's last token, and one behind each token of `draft`.
        """
        if draws[0].error_code is not None:
            self.stop(sequence)
            return []
        verified = draws[:1]
        for guess, draw in zip(draft, draws[1:], strict=True):
            if verified[-1].token_id != guess or draw.error_code is not None:
                break
            verified.append(draw)
        return verified

    def learn(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Lengthens drafts that came true, shortens those that did not, and pauses where even short ones fail."""
        history = self._histories[sequence]
        history.num_proven = num_accepted if num_accepted == num_drafted else 0
        if num_accepted == num_drafted:
            history.length = min(max(history.length, 2 * num_drafted + 1), self._max_tokens)
        elif num_accepted < num_drafted // 2 or num_accepted == 0:
            history.length //= 2
        if history.length == 0:
            history.length = 1
            history.paused_until = sequence.num_tokens + _PAUSE_TOKENS

    def stop(self, sequence: Sequence) -> None:
        """No guesses for this sequence any more."""
        self._histories[sequence].paused_until = sys.maxsize


class _History:
    """Where each pair and triple of tokens last occurred."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.num_proven = 0  # tokens of the latest draft, if all of it came true
        self.paused_until = 0
        self._num_read = 0
        self._ends: dict[tuple[int, ...], int] = {}  # tokens → index behind them

    def read(self, token_ids: list[int]) -> None:
        """Takes in all but the latest tokens, which would only find themselves."""
        for end in range(max(self._num_read, _SHORT, len(token_ids) - _MAX_INDEXED_TOKENS), len(token_ids)):
            self._ends[tuple(token_ids[end - _SHORT : end])] = end
            if end >= _LONG:
                self._ends[tuple(token_ids[end - _LONG : end])] = end
        self._num_read = len(token_ids)

    def continuation(self, token_ids: list[int], length: int, sizes: tuple[int, ...] = (_LONG, _SHORT)) -> list[int]:
        for size in sizes:
            end = self._ends.get(tuple(token_ids[-size:]))
            if end is not None:
                # A loop shorter than the draft goes on into the draft itself.
                period = len(token_ids) - end
                return [token_ids[end + i % period] for i in range(length)]
        return []
