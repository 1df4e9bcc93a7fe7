"""Reads the bodies of HTTP requests: each no larger and no slower than this, so many bytes of one caller, and of all.

Owns the four bounds, and knows no route. Without the last two, connections that each send a large body slowly fill the
memory, however few requests begin, or keep everybody else's body out.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from pagedd.client.errors import PageddError
from pagedd.client.protocol import MAX_MESSAGE_BYTES
from pagedd.daemon.caller import Caller

TIMEOUT_S = 60.0
# Of all bodies that are on their way or being parsed, beyond what each has free.
MAX_BYTES_TOGETHER = 8 * MAX_MESSAGE_BYTES
# Of one caller's, so that a few who send slowly leave room for the others.
MAX_BYTES_OF_CALLER = MAX_BYTES_TOGETHER // 4
# A connection costs that much without a body; so most prompts come through whatever others send.
FREE_BYTES = 16 << 10


class BodyReader:
    """Shared by all listeners. One event loop.

    Attributes:
        num_bytes: what counts towards `MAX_BYTES_TOGETHER` now, by the callers' tags.
    """

    def __init__(self) -> None:
        self.num_bytes: Counter[str] = Counter()

    @asynccontextmanager
    async def read(self, request: web.Request, caller: Caller) -> AsyncIterator[bytearray]:
        """The whole body. It counts until the context ends, and is empty from then on.

        Raises `PageddError`: message_too_large, body_timeout, too_many_bodies, or malformed_message for one that breaks
        off.
        """
        declared = request.content_length
        if declared is not None and declared > MAX_MESSAGE_BYTES:
            raise PageddError("message_too_large", f"a body of {declared} bytes, limit {MAX_MESSAGE_BYTES}; send less")
        body, tag = bytearray(), caller.tag
        try:
            await self._read_in_time(request, body, tag)
            yield body
        finally:
            self.num_bytes[tag] -= _counted(body)
            if not self.num_bytes[tag]:
                del self.num_bytes[tag]
            body.clear()

    async def _read_in_time(self, request: web.Request, body: bytearray, tag: str) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                async for part in request.content.iter_any():
                    self._take(part, body, tag)
        except web.RequestPayloadError as error:
            why = str(error).partition("\n")[0]
            raise PageddError("malformed_message", f"the body cannot be read: {why}") from error
        except TimeoutError as error:
            # Also after a wrong chunk, of which aiohttp tells the next request only.
            what = f"{len(body)} bytes of a body came in {TIMEOUT_S:g} s and it is not whole"
            raise PageddError("body_timeout", f"{what}; send it faster, or in parts") from error

    def _take(self, part: bytes, body: bytearray, tag: str) -> None:
        """Adds `part` to `body`, or nothing: what `body` has is what is counted."""
        if len(body) + len(part) > MAX_MESSAGE_BYTES:
            raise PageddError(
                "message_too_large", f"a body of over {MAX_MESSAGE_BYTES} bytes, which is the limit; send less"
            )
        num_new = max(0, len(body) + len(part) - FREE_BYTES) - _counted(body)
        for whose, num_bytes, limit in (
            ("this caller's bodies", self.num_bytes[tag], MAX_BYTES_OF_CALLER),
            ("bodies", self.num_bytes.total(), MAX_BYTES_TOGETHER),
        ):
            if num_new and num_bytes + num_new > limit:
                what = f"{num_bytes} bytes of {whose} are on their way, limit {limit}"
                raise PageddError("too_many_bodies", f"{what}; try again shortly")
        body += part
        self.num_bytes[tag] += num_new


def _counted(body: bytearray) -> int:
    return max(0, len(body) - FREE_BYTES)
