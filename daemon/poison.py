"""Requests that may have killed engines: one that was in flight at two deaths is not tried a third time.

Many are in flight when an engine dies and at most one of them did it. So a request that later runs to its end is
cleared, and what nobody sends again is forgotten after a while. Knows digests only, never a prompt.
"""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace

import msgspec

from pagedd.client.errors import PageddError
from pagedd.engine.request import Request

MAX_DEATHS = 2
FORGET_AFTER_S = 3600.0
_MAX_SUSPECTS = 4096


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
        self._deaths: OrderedDict[bytes, tuple[int, float]] = OrderedDict()  # digest -> deaths, s of the last one

    def check(self, suspect: bytes) -> None:
        """Raises `PageddError("poison_request")` for one that was in flight at `MAX_DEATHS` deaths."""
        num_deaths, last_s = self._deaths.get(suspect, (0, 0.0))
        if num_deaths and self._clock() - last_s > FORGET_AFTER_S:
            self.clear(suspect)
        elif num_deaths >= MAX_DEATHS:
            raise PageddError(
                "poison_request",
                f"{num_deaths} engines died while this request ran; it is refused for an hour. The crash reports are "
                "in the daemon's state directory; change the request, or report the fault",
            )

    def engine_died(self, in_flight: Iterable[bytes]) -> None:
        now_s = self._clock()
        for suspect in set(in_flight):
            num_deaths, last_s = self._deaths.pop(suspect, (0, 0.0))
            is_old = now_s - last_s > FORGET_AFTER_S
            self._deaths[suspect] = (1 if is_old else num_deaths + 1, now_s)
        while len(self._deaths) > _MAX_SUSPECTS:
            self._deaths.popitem(last=False)

    def clear(self, suspect: bytes) -> None:
        """It ran to its end, so it was not the one."""
        self._deaths.pop(suspect, None)
