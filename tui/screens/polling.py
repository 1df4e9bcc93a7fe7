"""A question that a screen asks again and again while somebody looks at it."""

import asyncio
from collections.abc import Callable, Coroutine

from pagedd.tui.session import Session


class Polling:
    """Calls `take` every `interval_s`, never twice at once.

    Args:
        take: asks, and keeps the answer or the error.
    """

    def __init__(self, interval_s: float, take: Callable[[], Coroutine[None, None, None]]) -> None:
        self._interval_s = interval_s
        self._take = take
        self._asked_s: float | None = None
        self._asking: asyncio.Task[None] | None = None

    def tick(self, session: Session) -> None:
        """To be called with every frame: asks when it is time, and neither while paused nor when nobody answers."""
        now_s = session.clock()
        is_asking = self._asking is not None and not self._asking.done()
        is_due = self._asked_s is None or now_s - self._asked_s >= self._interval_s
        if is_due and not is_asking and not session.is_paused and not session.is_stale:
            self._asked_s = now_s
            self._asking = asyncio.ensure_future(self._take())

    def hurry(self) -> None:
        """The next frame asks, however short ago the last one did."""
        self._asked_s = None

    def stop(self) -> None:
        """Gives up a question under way."""
        if self._asking is not None:
            self._asking.cancel()
