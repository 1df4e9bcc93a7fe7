"""Peers of the daemon's end of ZeroMQ: libzmq's, raw ones that say what they are told to, and a server that echoes."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvloop
import zmq
import zmq.asyncio

from pagedd.client.endpoints import ipc
from pagedd.daemon.zmq_server import Handler, HeldBytes, Peer, Server
from pagedd.daemon.zmtp import SocketKind

from .test_zmtp import GREETING, ready_as
from .waiting import WAIT_S

KIND = SocketKind(b"ROUTER", frozenset({b"DEALER", b"REQ", b"ROUTER"}), max_message_bytes=1 << 20, max_frames=8)
HANDSHAKE = GREETING + ready_as(b"DEALER")
run_on_both_loops = pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
Run = Callable[[Coroutine[Any, Any, None]], None]


@dataclass
class Echo(Handler):
    """Says everything again, and keeps who said what."""

    heard: list[tuple[Peer, list[bytes]]] = field(default_factory=list)
    slow: list[Peer] = field(default_factory=list)
    num_gone: int = 0

    def on_message(self, peer: Peer, frames: list[bytes]) -> None:
        self.heard.append((peer, frames))
        peer.send(frames)

    def on_too_slow(self, peer: Peer) -> None:
        self.slow.append(peer)

    def on_gone(self, peer: Peer) -> None:
        self.num_gone += 1


@dataclass
class Running:
    server: Server
    echo: Echo
    path: Path

    async def join(self, handshake: bytes = HANDSHAKE) -> "Raw":
        """A peer that says what it is told to."""
        reader, writer = await asyncio.open_unix_connection(str(self.path))
        writer.write(handshake)
        return Raw(reader, writer)


@dataclass
class Raw:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def hear(self, expected: bytes) -> None:
        got = await asyncio.wait_for(self.reader.readexactly(len(expected)), WAIT_S)
        assert got == expected

    async def until_closed(self) -> bytes:
        """What it still heard."""
        chunks = []
        try:
            while chunk := await asyncio.wait_for(self.reader.read(1 << 16), WAIT_S):
                chunks.append(chunk)
        except ConnectionError:  # it had not read all that was said
            pass
        self.writer.close()
        return b"".join(chunks)


@asynccontextmanager
async def running(folder: Path, held: HeldBytes | None = None, linger_s: float = 0.0) -> AsyncIterator[Running]:
    echo, path = Echo(), folder / "echo.sock"
    server = Server(KIND, path, echo, held or HeldBytes(64 << 20))
    await server.start(0o600, {})
    try:
        yield Running(server, echo, path)
    finally:
        await server.close(linger_s)


@contextmanager
def libzmq(kind: int, path: Path, **options: int | bytes) -> Iterator[zmq.asyncio.Socket]:
    with zmq.asyncio.Context() as context, context.socket(kind) as peer:
        peer.setsockopt(zmq.LINGER, 0)
        for name, value in options.items():
            peer.setsockopt(getattr(zmq, name), value)
        peer.connect(ipc(path))
        yield peer


async def hear(peer: zmq.asyncio.Socket) -> list[bytes]:
    return await asyncio.wait_for(peer.recv_multipart(), WAIT_S)
