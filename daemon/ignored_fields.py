"""Fields of HTTP bodies that mean nothing to pagedd. They are ignored, as by vLLM, and each name is said once.

Owns which names the log has heard, at most `MAX_NAMES`: callers choose them.
"""

import difflib
import logging
from collections.abc import Collection

import msgspec

log = logging.getLogger(__name__)

MAX_NAMES = 64
_SHOWN_CHARS = 64

_NAMES = msgspec.json.Decoder(dict[str, msgspec.Raw])


class IgnoredFields:
    def __init__(self) -> None:
        self._said: set[str] = set()

    def note(self, body: bytes, known: Collection[str]) -> None:
        """`body` is a JSON object that has been decoded, `known` the fields that were looked for in it."""
        if len(self._said) >= MAX_NAMES:
            return
        try:
            names = _NAMES.decode(body).keys()
        except (msgspec.DecodeError, UnicodeDecodeError):  # nobody has looked at the names that nobody knows
            return
        for name in names - set(known) - self._said:
            if len(self._said) == MAX_NAMES:
                return
            self._said.add(name)
            nearest = difflib.get_close_matches(name[:_SHOWN_CHARS], known, n=1, cutoff=0.8)
            hint = f"; did its client mean {nearest[0]}?" if nearest else ""
            log.info("a body has the field %s, which is not known here and ignored%s", ascii(name[:_SHOWN_CHARS]), hint)
