"""Reads the bodies of HTTP requests: each no larger and no slower than this, and all together no more than so much.

Owns the three bounds, and knows no route. Without the last, connections that each send a large body slowly fill the
memory, however few requests begin.
"""

import asyncio

from aiohttp import web

from pagedd.client.errors import PageddError
from pagedd.client.protocol import MAX_MESSAGE_BYTES

TIMEOUT_S = 60.0
# Of all bodies that are on their way, beyond what each has free.
MAX_BYTES_TOGETHER = 8 * MAX_MESSAGE_BYTES
# A connection costs that much without a body; so most prompts come through whatever others send.
FREE_BYTES = 16 << 10


class BodyReader:
    """Shared by all listeners. One event loop.

    Attributes:
        num_bytes: what counts towards `MAX_BYTES_TOGETHER` now.
    """

    def __init__(self) -> None:
        self.num_bytes = 0

    async def read(self, request: web.Request) -> bytes:
        """The whole body.

        Raises `PageddError`: message_too_large, body_timeout, too_many_bodies, or malformed_message for one that breaks
        off.
        """
        declared = request.content_length
        if declared is not None and declared > MAX_MESSAGE_BYTES:
            raise PageddError("message_too_large", f"a body of {declared} bytes, limit {MAX_MESSAGE_BYTES}; send less")
        body = bytearray()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._read(request, body)
        except web.RequestPayloadError as error:
            why = str(error).partition("\n")[0]
            raise PageddError("malformed_message", f"the body cannot be read: {why}") from error
        except TimeoutError as error:
            # Also after a wrong chunk, of which aiohttp tells the next request only.
            what = f"{len(body)} bytes of a body came in {TIMEOUT_S:g} s and it is not whole"
            raise PageddError("body_timeout", f"{what}; send it faster, or in parts") from error
        return bytes(body)

    async def _read(self, request: web.Request, body: bytearray) -> None:
        num_counted = 0
        try:
            async for part in request.content.iter_any():
                body += part
                if len(body) > MAX_MESSAGE_BYTES:
                    raise PageddError(
                        "message_too_large", f"a body of over {MAX_MESSAGE_BYTES} bytes, which is the limit; send less"
                    )
                num_new = max(0, len(body) - FREE_BYTES) - num_counted
                if num_new and self.num_bytes + num_new > MAX_BYTES_TOGETHER:
                    what = f"{self.num_bytes} bytes of bodies are on their way, limit {MAX_BYTES_TOGETHER}"
                    raise PageddError("too_many_bodies", f"{what}; try again shortly")
                num_counted += num_new
                self.num_bytes += num_new
        finally:
            self.num_bytes -= num_counted
