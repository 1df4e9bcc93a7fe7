"""The log-probabilities of a choice's tokens until they are sent: up to 21 numbers a token, and a long answer has many.

Owns how they are kept: 12 bytes for each, where objects take 200.
"""

from array import array
from collections.abc import Callable
from itertools import islice

from pagedd.client.protocol import TokenLogprob
from pagedd.engine.request import TokenLogprobs


class LogprobList:
    """Of the tokens that came since the last `take`, in order. `token_text` spells a token."""

    def __init__(self, token_text: Callable[[int], str]) -> None:
        self._token_text = token_text
        self._forget()

    def append(self, token_id: int, at: TokenLogprobs) -> None:
        self._ids.append(token_id)
        self._logprobs.append(at.logprob)
        for other, logprob in at.top:
            self._ids.append(other)
            self._logprobs.append(logprob)
        self._num_top.append(len(at.top))

    def take(self) -> list[TokenLogprob]:
        """All of them, which are then forgotten."""
        each = zip(self._ids, map(self._token_text, self._ids), self._logprobs, strict=True)
        found = []
        for num_top in self._num_top:
            token_id, token, logprob = next(each)
            top = list(islice(each, num_top))
            found.append(TokenLogprob(token_id=token_id, token=token, logprob=logprob, top=top))
        self._forget()
        return found

    def _forget(self) -> None:
        self._ids = array("i")
        self._logprobs = array("d")
        self._num_top = array("i")
