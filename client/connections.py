"""The connections of one client: each opened at its first use, and again after the daemon was away.

Owns which are open, and how long an answer is waited for. Knows no meaning of a question; `aio.py` says what to ask.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import zmq
import zmq.asyncio

from pagedd.client.connection import Connection, as_error
from pagedd.client.endpoints import Endpoints, client_endpoints
from pagedd.client.errors import PageddError
from pagedd.client.link import Link
from pagedd.client.protocol import ClientMessage, DaemonMessage

_Answer = TypeVar("_Answer", bound=DaemonMessage)


class Connections:
    """To the sockets in one folder. Belongs to one event loop.

    Args:
        runtime_dir: that folder; None looks in the usual places whenever a connection is needed.
        timeout_s: most seconds to wait for a connection or for an answer that costs the daemon nothing.
    """

    def __init__(self, runtime_dir: str | Path | None, timeout_s: float) -> None:
        self._runtime_dir = runtime_dir
        self._timeout_s = timeout_s
        self._open: dict[Path, Connection] = {}
        self._opening = asyncio.Lock()

    async def requests(self) -> Connection:
        """The one for everybody. Raises `PageddError("daemon_unreachable")`, as everything here does."""
        return await self._connection(self._endpoints().requests)

    async def ask(self, question: ClientMessage, kind: type[_Answer]) -> _Answer:
        """The answer, of this `kind`. Raises `PageddError`: what the daemon refused it with."""
        return await self._answer(await self.requests(), question, kind, self._timeout_s)

    async def order(self, question: ClientMessage, kind: type[_Answer], *, waits: bool = False) -> _Answer:
        """The same of the admin socket. Raises also `PageddError("forbidden")`.

        `waits`: for as long as it takes, because what is ordered takes its time.
        """
        admin = await self._connection(self._endpoints().admin)
        return await self._answer(admin, question, kind, None if waits else self._timeout_s)

    async def watch(self, options: Mapping[int, int | bytes]) -> Link:
        """A subscriber's, with these ZeroMQ options. The caller's own: it closes it."""
        return await self._link(zmq.SUB, self._endpoints().stats, options)

    async def close(self) -> None:
        """Ends what is asked over them. They can be used again."""
        for connection in self._open.values():
            await connection.close()
        self._open.clear()

    def _endpoints(self) -> Endpoints:
        return client_endpoints(self._runtime_dir)

    async def _answer(
        self, connection: Connection, question: ClientMessage, kind: type[_Answer], timeout_s: float | None
    ) -> _Answer:
        inbox = connection.post(question)
        try:
            async with asyncio.timeout(timeout_s):
                answer = await inbox.get()
        except TimeoutError:
            raise PageddError(
                "daemon_unreachable", f"{connection.path}: no answer within {timeout_s:g} s; is the daemon hung?"
            ) from None
        finally:
            connection.forget(question.id)
        if isinstance(answer, kind):
            return answer
        raise as_error(answer)

    async def _connection(self, path: Path) -> Connection:
        async with self._opening:
            connection = self._open.get(path)
            if connection is None or connection.is_lost:
                connection = Connection(await self._link(zmq.DEALER, path))
                self._open[path] = connection
            return connection

    async def _link(self, socket_type: int, path: Path, options: Mapping[int, int | bytes] | None = None) -> Link:
        # The process's one context: it has no state of ours, and ends with the process.
        return await Link.open(zmq.asyncio.Context.instance(), socket_type, path, self._timeout_s, options)
