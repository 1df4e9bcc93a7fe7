"""Carries a request's messages from the service's callback to the task that writes them out.

Owns the bound on what may lie unread. Everything that one engine step gave is taken at once, so that it is one write.
"""

import asyncio
from collections.abc import Callable

from pagedd.client.protocol import DaemonMessage

# About half a minute of a fast stream; a whole answer of one choice fits, so that a short pause harms nobody.
MAX_UNREAD_MESSAGES = 8192


class RequestStream:
    """A queue for one reader. `push` is a `service.Sink`."""

    def __init__(self, on_overflow: Callable[[], None], max_unread: int = MAX_UNREAD_MESSAGES) -> None:
        """`on_overflow` is called once, from the event loop, when more than `max_unread` messages wait."""
        self._messages: list[DaemonMessage] = []
        self._arrived: asyncio.Future[None] | None = None
        self._on_overflow: Callable[[], None] | None = on_overflow
        self._max_unread = max_unread

    def push(self, message: DaemonMessage) -> None:
        self._messages.append(message)
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)
        if len(self._messages) > self._max_unread and self._on_overflow is not None:
            # Not here: the service is in the middle of carrying out what the request decided.
            asyncio.get_running_loop().call_soon(self._on_overflow)
            self._on_overflow = None

    async def take(self) -> list[DaemonMessage]:
        """Waits for at least one message and returns all that are there, in order."""
        if not self._messages:
            self._arrived = asyncio.get_running_loop().create_future()
            try:
                await self._arrived
            finally:
                self._arrived = None
        messages, self._messages = self._messages, []
        return messages
