"""Whatever comes over an HTTP connection: request lines, headers, chunks. Each answer is HTTP, and none is a fault."""

import asyncio
import logging
from typing import Any

from aiohttp import web

from pagedd.bench.fuzz.target import Target
from pagedd.client.errors import PageddError
from pagedd.daemon.http_api import MAX_HEADER_BYTES, error_response
from pagedd.daemon.http_connection import HttpConnection, OpenConnections

# What a request may take of the event loop before its answer is out.
_TURNS = 12


class _Pipe(asyncio.Transport):
    """What is written, without a socket."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self._is_closing = False

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._is_closing = True

    def abort(self) -> None:
        self._is_closing = True

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class _Faults(logging.Handler):
    """The log's errors."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(self.format(record))


class _Front:
    """An event loop and a server that takes any body, as often as it is asked."""

    def __init__(self) -> None:
        self._faults = _Faults()
        logging.getLogger().addHandler(self._faults)
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(self._start())

    async def _start(self) -> web.Server:
        return web.Server(_answer, handler_cancellation=True)

    def serve(self, data: bytes) -> bytes:
        """What is answered. Raises `AssertionError` when something was logged as a fault."""
        self._faults.found.clear()
        written = self._loop.run_until_complete(self._serve(data))
        assert not self._faults.found, self._faults.found[0]
        return written

    async def _serve(self, data: bytes) -> bytes:
        pipe = _Pipe()
        connection = HttpConnection(
            self._server,
            OpenConnections(1),
            _refuse,
            access_log=None,
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
        )
        connection.connection_made(pipe)
        # In two pieces, as a network may cut it.
        for piece in (data[: len(data) // 2], data[len(data) // 2 :]):
            if not pipe.is_closing():
                connection.data_received(piece)
            for _ in range(_TURNS):
                await asyncio.sleep(0)
        connection.connection_lost(None)
        for _ in range(3):
            await asyncio.sleep(0)
        return pipe.written


async def _answer(request: web.BaseRequest) -> web.Response:
    try:
        body = await request.read()
    except web.RequestPayloadError as error:
        return _refuse(PageddError("malformed_message", str(error)[:200]))
    return web.Response(body=str(len(body)).encode())


def _refuse(error: PageddError) -> web.Response:
    assert error.http_status < 500, error
    return error_response(error, retry_after_s=1)


_front: _Front | None = None


def read(data: bytes) -> None:
    global _front
    _front = _front or _Front()
    written = _front.serve(data)
    assert not written or written.startswith(b"HTTP/"), written[:100]


TARGET = Target(
    read,
    [
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Type: application/json\r\n\r\n{}   ",
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2;x=y\r\n{}\r\n0\r\nTrailer: a\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc",
        b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\nGET http://a:b@[::1]:8/%zz?q HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET http://a:b@[:]:@/ HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n\x00",
    ],
)
