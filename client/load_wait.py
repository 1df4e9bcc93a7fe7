"""How long a request waits for a daemon that is still loading its model, or whose engine is just waking.

Owns the clock of one such wait and whether it goes on; sending the request again, which only the first asks for, is
`aio.py`'s.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from pagedd.client.errors import PageddError

# States of the daemon, as its `Pong` names them, after which it may be ready.
_BEFORE_READY = frozenset({"starting", "loading", "restarting"})
_POLL_S = 0.25

_T = TypeVar("_T")


class LoadWait:
    """The wait of one request, `limit_s` at most from when it is put off first; `on_begin` is called then, or never."""

    def __init__(self, limit_s: float, on_begin: Callable[[], None] | None) -> None:
        self.is_waiting = False
        self._limit_s = limit_s
        self._on_begin = on_begin
        self._until_s: float | None = None
        self._given_up = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """No refusal is waited out any more."""
        return self._limit_s <= 0 if self._until_s is None else time.monotonic() >= self._until_s

    def give_up(self) -> None:
        """Whoever waits is refused at once."""
        self._given_up.set()

    async def until_loaded(self, read_state: Callable[[], Awaitable[str]]) -> None:
        """Returns when it is worth a try, or when the limit is reached, so that the last refusal is a fresh one.

        Raises `PageddError`: `engine_loading` after `give_up`, and what `read_state` raises.
        """
        until_s = self._begin()
        self.is_waiting = True
        try:
            while (left_s := until_s - time.monotonic()) > 0:
                # Before the first look as well: a daemon that is ready and yet refuses is asked with pauses.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(_POLL_S, left_s)):
                        await self._given_up.wait()
                    raise PageddError("engine_loading", "the request was cancelled before the model was loaded")
                if await read_state() not in _BEFORE_READY:
                    return
        finally:
            self.is_waiting = False

    async def until_awake(self, answer: Awaitable[_T]) -> _T:
        """What the daemon answers to a request that it holds until its engine is awake.

        Raises `PageddError("engine_loading")` at the limit.
        """
        until_s = self._begin()
        try:
            async with asyncio.timeout(max(0.0, until_s - time.monotonic())):
                return await answer
        except TimeoutError:
            raise PageddError("engine_loading", "the engine slept and is waking; try again shortly") from None

    def _begin(self) -> float:
        """The end of the wait, which begins now if it has not."""
        if self._until_s is None:
            self._until_s = time.monotonic() + self._limit_s
            if self._limit_s > 0 and self._on_begin is not None:
                self._on_begin()
        return self._until_s
