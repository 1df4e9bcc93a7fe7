"""Requests that may have killed engines: one that was in flight at two deaths, at the second as the only suspect, is
not tried a third time.

Many are in flight when an engine dies and at most one of them did it, so all are suspects until they run to their end,
or nobody has sent them again for a while. An engine has one suspect at a time: of two, the second death would tell
nothing. A caller's suspects are its own: what one sends is not held against another who sends the same. Knows digests
only, never a prompt.
"""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import replace

import msgspec

from pagedd.client.errors import PageddError
from pagedd.engine.request import Request

MAX_DEATHS = 2
FORGET_AFTER_S = 3600.0
_MAX_SUSPECTS = 4096

# A caller's tag, and the digest of what it sends.
Suspect = tuple[str, bytes]


def digest(request: Request) -> bytes:
    """The same for every sending of a request, whoever sends it: its prompt, and how it is to be continued."""
    # The seed is drawn anew for each sending that names none.
    asked = (request.prompt_token_ids, replace(request.params, seed=0))
    return hashlib.blake2b(msgspec.msgpack.encode(asked), digest_size=16).digest()


class Suspects:
    """Who was in flight when an engine died. One event loop.

    Args:
        clock: seconds; replaceable so that tests decide what time it is.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._deaths: OrderedDict[Suspect, tuple[int, float]] = OrderedDict()  # deaths, and s of the last one

    def __contains__(self, suspect: Suspect) -> bool:
        """Whether it was in flight at a death, and has not been cleared since."""
        _, last_s = self._deaths.get(suspect, (0, None))
        if last_s is not None and self._clock() - last_s > FORGET_AFTER_S:
            self.clear(suspect)
        return suspect in self._deaths

    def check(self, suspect: Suspect) -> None:
        """Raises `PageddError("poison_request")` for one that is taken to have killed `MAX_DEATHS` engines."""
        if suspect in self and self._deaths[suspect][0] >= MAX_DEATHS:
            raise PageddError(
                "poison_request",
                f"{MAX_DEATHS} engines died while this request ran; it is refused for an hour. The crash reports are "
                "in the daemon's state directory; change the request, or report the fault",
            )

    def engine_died(self, in_flight: Collection[Suspect]) -> None:
        """Counts for all of `in_flight` that were no suspects; for those that were, when there was but one."""
        known = [suspect for suspect in in_flight if suspect in self]
        now_s = self._clock()
        for suspect in set(in_flight):
            num_deaths, _ = self._deaths.pop(suspect, (0, 0.0))
            is_counted = suspect not in known or len(known) == 1
            self._deaths[suspect] = (num_deaths + is_counted, now_s)
        while len(self._deaths) > _MAX_SUSPECTS:
            self._deaths.popitem(last=False)

    def clear(self, suspect: Suspect) -> None:
        """It ran to its end, so it was not the one."""
        self._deaths.pop(suspect, None)
