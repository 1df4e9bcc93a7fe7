"""One HTTP connection: bytes that are not HTTP get the same error object as every other refusal, and there is a bound.

Owns what aiohttp decides before any route is looked for. Routes, callers and errors of routes are `http_api.py`'s.
"""

import asyncio
import logging
import resource
from collections.abc import Callable
from typing import Any, cast

from aiohttp import web

from pagedd.client.errors import PageddError

log = logging.getLogger(__name__)

# What systemd's unit asks for as well.
_MAX_DESCRIPTORS = 65_536


def raise_descriptor_limit() -> None:
    """Takes as many descriptors as this process may have, up to what the unit would give: a shell's 1024 are few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def max_connections() -> int:
    """Half of the descriptors. libzmq ends the whole process when it finds none left for a connection of its own."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (_MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft) // 2


class ConnectionCount:
    """The connections that are open, shared by all listeners, and how many there may be."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.now = 0


class HttpConnection(web.RequestHandler):
    """aiohttp's protocol of one connection, with this project's errors."""

    __slots__ = ("_count", "_refuse")

    def __init__(
        self,
        server: web.Server,
        count: ConnectionCount,
        refuse: Callable[[PageddError], web.Response],
        **options: Any,
    ) -> None:
        """`refuse` counts an error and makes its response; `options` are those of `web.RequestHandler`."""
        super().__init__(server, loop=asyncio.get_running_loop(), **options)
        self._count = count
        self._refuse = refuse

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._count.now += 1
        if self._count.now > self._count.limit:
            log.warning("%d HTTP connections are open, limit %d; one is closed", self._count.now, self._count.limit)
            cast(asyncio.Transport, transport).abort()  # uvloop's is one in all but its bases

    def connection_lost(self, exc: BaseException | None) -> None:
        self._count.now -= 1
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        try:
            super().data_received(data)
        except Exception as error:
            # The parser refuses what is no HTTP; this is where it breaks, as at the host of http://[:@/.
            log.info("bytes that aiohttp cannot parse (%r); their connection is closed", error)
            self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what never reached a route. The connection ends with it."""
        if request.writer.output_size > 0:
            raise ConnectionError("an answer is under way already")
        if status < 500:
            # What is wrong is in the first line; the rest shows the bytes.
            first = (message or "").partition("\n")[0].rstrip(":")[:200]
            response = self._refuse(PageddError("malformed_message", f"not HTTP/1.1: {first}"))
        else:
            log.error("a connection broke", exc_info=exc)
            response = self._refuse(PageddError("internal", "the log has the trace"))
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        # A body that broke off has been refused; aiohttp meets it again when it reads what is left.
        if not isinstance(kw.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **kw)
