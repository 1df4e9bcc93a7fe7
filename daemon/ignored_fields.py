"""Fields of HTTP bodies that mean nothing to pagedd. They are ignored, as by vLLM, and each name is said once.

Owns which names the log has heard: callers choose them, so they look like names, and each caller has so many.
"""

import logging
import re
from collections.abc import Collection
from itertools import islice

import msgspec

from pagedd.client.nearest import nearest

log = logging.getLogger(__name__)

MAX_NAMES = 16  # of each caller
MAX_CALLERS = 256
# What is none may be a text that went astray.
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,39}")

_NAMES = msgspec.json.Decoder(dict[str, msgspec.Raw])


class IgnoredFields:
    def __init__(self) -> None:
        self._said: set[str] = set()
        self._num_said: dict[str, int] = {}

    def note(self, body: bytes | bytearray, known: Collection[str], caller: str) -> None:
        """`body` is a JSON object that has been decoded, `known` the fields that were looked for in it.

        `caller` is the tag of who sent it.
        """
        if self._num_said.get(caller, 0) >= MAX_NAMES or len(self._num_said) >= MAX_CALLERS:
            return
        try:
            names = _NAMES.decode(body).keys()
        except (msgspec.DecodeError, UnicodeDecodeError):  # nobody has looked at the names that nobody knows
            return
        unknown = (name for name in names if _NAME.fullmatch(name) and name not in known and name not in self._said)
        num_left = MAX_NAMES - self._num_said.get(caller, 0)
        for name in list(islice(unknown, num_left)):
            self._said.add(name)
            self._num_said[caller] = self._num_said.get(caller, 0) + 1
            meant = nearest(name, known)
            hint = f"; did its client mean {meant}?" if meant is not None else ""
            log.info("a body has the field %r, which is not known here and ignored%s", name, hint)
