"""One HTTP connection: how long it may take over a head and an answer, and how many of its listener there may be.

Owns what aiohttp decides before any route is looked for: bytes that are not HTTP get the same error object as every
other refusal. Routes, callers and errors of routes are `http_api.py`'s.
"""

import asyncio
import logging
import resource
import time
from collections.abc import Callable
from typing import Any

from aiohttp import web

from pagedd.client.errors import PageddError

log = logging.getLogger(__name__)

# What systemd's unit asks for as well.
_MAX_DESCRIPTORS = 65_536
# A whole head has to be there so soon after the connection, or after its first byte.
HEAD_TIMEOUT_S = 10.0
# A client that takes nothing of an answer for so long does not read.
READ_TIMEOUT_S = 30.0
_WARNING_INTERVAL_S = 60.0


def raise_descriptor_limit() -> None:
    """Takes as many descriptors as this process may have, up to what the unit would give: a shell's 1024 are few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def max_connections() -> int:
    """Half of the descriptors: files, the engine and the other sockets need some as well."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (_MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft) // 2


class OpenConnections:
    """The connections of one listener. When there are more than `limit`, the one that was used least recently and asks
    nothing now gives way; where all ask something, the newest.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._by_use: dict[HttpConnection, None] = {}  # least recently first
        self._warned_s = -_WARNING_INTERVAL_S

    def add(self, connection: "HttpConnection") -> None:
        self._by_use[connection] = None
        if len(self._by_use) <= self.limit:
            return
        if (now_s := time.monotonic()) >= self._warned_s + _WARNING_INTERVAL_S:
            self._warned_s = now_s
            log.warning("%d HTTP connections are open, limit %d; some are closed", len(self._by_use), self.limit)
        leaving = next((other for other in self._by_use if other.is_idle), connection)
        self.remove(leaving)
        leaving.abort()

    def used(self, connection: "HttpConnection") -> None:
        if connection in self._by_use:
            del self._by_use[connection]
            self._by_use[connection] = None

    def remove(self, connection: "HttpConnection") -> None:
        self._by_use.pop(connection, None)


class HttpConnection(web.RequestHandler):
    """aiohttp's protocol of one connection, with this project's errors."""

    __slots__ = ("_connections", "_head_timer", "_refuse")

    def __init__(
        self,
        server: web.Server,
        connections: OpenConnections,
        refuse: Callable[[PageddError], web.Response],
        **options: Any,
    ) -> None:
        """`refuse` counts an error and makes its response; `options` are those of `web.RequestHandler`."""
        super().__init__(server, loop=asyncio.get_running_loop(), **options)
        self._connections = connections
        self._refuse = refuse
        self._head_timer: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """Whether it waits for a whole head, as aiohttp itself tells."""
        return self._waiter is not None and not self._waiter.done()

    def abort(self) -> None:
        """Ends it without a word, and what is answered on it."""
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._expect_head()
        self._connections.add(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._head_came()
        self._connections.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        num_heads = self._request_count
        self._parse(data)
        if self._request_count > num_heads:
            self._head_came()
            self._connections.used(self)
        elif self.is_idle and self._head_timer is None:
            self._expect_head()

    def _expect_head(self) -> None:
        self._head_timer = self._loop.call_later(HEAD_TIMEOUT_S, self._close_without_head)

    def _head_came(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _close_without_head(self) -> None:
        log.debug("a connection is closed: no whole head came in %g s", HEAD_TIMEOUT_S)
        self.abort()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Writes what is left of an answer, for as long as its client reads."""
        watch = _Reading(self._loop, self.transport)
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            watch.cancel()
            self._connections.used(self)
            if isinstance(resp, web.Response):
                resp.body = None  # a connection that rests would keep its last answer

    def _parse(self, data: bytes) -> None:
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


class _Reading:
    """Ends a connection that takes nothing of what is written to it for `READ_TIMEOUT_S`, until it is cancelled."""

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport | None) -> None:
        self._loop = loop
        self._transport = transport
        self._num_unread = 0
        self._timer = loop.call_later(READ_TIMEOUT_S, self._look)

    def cancel(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        num_before, self._num_unread = self._num_unread, self._transport.get_write_buffer_size()
        if 0 < num_before <= self._num_unread:
            log.info("a connection is closed: %d bytes of an answer lie unread", self._num_unread)
            self._transport.abort()
            return
        self._timer = self._loop.call_later(READ_TIMEOUT_S, self._look)
