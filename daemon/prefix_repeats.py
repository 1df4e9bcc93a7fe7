"""How much of the prompts began an earlier prompt, whether or not the prefix cache may use that.

Keeps digests of beginnings, in a bounded table, and no token. What is counted is compared by `doctor.py`.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

CHUNK_TOKENS = 64
MAX_CHUNKS = 32
MAX_BEGINNINGS = 4096
# Who asks differently for ever must not grow an entry: beyond so many the one unheard of for longest is forgotten.
MAX_SCOPES = 8


@dataclass(slots=True)
class PrefixCounts:
    """Since the daemon started; tokens in whole chunks of `CHUNK_TOKENS`, up to `MAX_CHUNKS` a prompt.

    Attributes:
        num_tokens: all of the prompts', also those beyond.
        num_repeated_tokens: a prompt of the same scope had begun so.
        num_apart_tokens: only prompts of other scopes had.
    """

    num_prompts: int = 0
    num_tokens: int = 0
    num_repeated_tokens: int = 0
    num_apart_tokens: int = 0


class PrefixRepeats:
    """The newest beginnings of prompts, with the scopes they came from. One event loop."""

    def __init__(self) -> None:
        self.counts = PrefixCounts()
        self._scopes: OrderedDict[bytes, dict[object, None]] = OrderedDict()  # the newest are last, in both

    def saw(self, token_ids: Sequence[int], scope: object) -> None:
        """A prompt was taken. Prompts of one `scope` may share what the prefix cache holds."""
        counts = self.counts
        counts.num_prompts += 1
        counts.num_tokens += len(token_ids)
        digest = b""
        for start in range(0, min(len(token_ids) // CHUNK_TOKENS, MAX_CHUNKS) * CHUNK_TOKENS, CHUNK_TOKENS):
            chunk = array("Q", token_ids[start : start + CHUNK_TOKENS]).tobytes()
            digest = blake2b(chunk, digest_size=16, key=digest).digest()
            scopes = self._scopes.setdefault(digest, {})
            self._scopes.move_to_end(digest)
            if scope in scopes:
                counts.num_repeated_tokens += CHUNK_TOKENS
                del scopes[scope]  # it becomes the newest
            elif scopes:
                counts.num_apart_tokens += CHUNK_TOKENS
            scopes[scope] = None
            if len(scopes) > MAX_SCOPES:
                del scopes[next(iter(scopes))]
        while len(self._scopes) > MAX_BEGINNINGS:
            self._scopes.popitem(last=False)
