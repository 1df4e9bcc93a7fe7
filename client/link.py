"""One monitored ZeroMQ connection to one Unix socket: it fails where ZeroMQ alone would wait for ever.

Owns the sockets: probing, connecting, noticing that the daemon is gone. Knows frames, not what is in them; `aio.py`
routes messages over it.
"""

import asyncio
import socket
from collections.abc import Mapping
from pathlib import Path

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from pagedd.client.endpoints import ipc
from pagedd.client.errors import PageddError

_HANDSHAKE_FAILURES = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL,
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL,
    zmq.Event.HANDSHAKE_FAILED_AUTH,
)


class Link:
    """A connected DEALER or SUB socket. Made by `Link.open`; used by one task for receiving, by any for sending."""

    def __init__(self, socket: zmq.asyncio.Socket, path: Path) -> None:
        self.path = path
        self._socket = socket
        self._monitor: zmq.asyncio.Socket = socket.get_monitor_socket(
            zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED | sum(_HANDSHAKE_FAILURES)
        )
        self._poller = zmq.asyncio.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._is_connected = False
        self._is_lost = False

    @classmethod
    async def open(
        cls,
        context: zmq.asyncio.Context,
        socket_type: int,
        path: Path,
        timeout_s: float,
        options: Mapping[int, int | bytes] | None = None,
    ) -> "Link":
        """Connects to the daemon at `path` and waits until both sides have shaken hands.

        Raises `PageddError`: `daemon_unreachable` (nobody listens, or no handshake within `timeout_s`), `forbidden`
        (this user may not open the socket).
        """
        probe(path)
        zmq_socket = context.socket(socket_type)
        # The daemon bounds what it accepts; blocking here would only hide a queue inside another one.
        zmq_socket.set(zmq.SNDHWM, 0)
        for option, value in (options or {}).items():
            zmq_socket.set(option, value)
        link = cls(zmq_socket, path)
        zmq_socket.connect(ipc(path))
        try:
            async with asyncio.timeout(timeout_s):
                while not link._is_connected and not link._is_lost:
                    await link._monitor.poll()
                    await link._take_events()
        except TimeoutError:
            link._is_lost = True
        except BaseException:
            link.close()
            raise
        if link._is_lost:
            link.close()
            raise PageddError(
                "daemon_unreachable",
                f"{path}: whoever listens there did not answer as pagedd within {timeout_s:g} s; see the daemon's log",
            )
        return link

    def send(self, *frames: bytes) -> None:
        """Queues one message. Never blocks, and is silent when the daemon is gone: `receive` tells."""
        # Eager: pyzmq tries at once and only then makes a future, which without a high-water mark is always done.
        self._socket.send_multipart(frames)

    async def receive(self) -> list[list[bytes]]:
        """Every message that has come, at least one, each as its frames.

        Raises `PageddError("daemon_unreachable")` when the daemon is gone and all it said has been received.
        """
        while True:
            # Events before messages: what the daemon said before it left is then never lost.
            await self._take_events()
            if messages := await _waiting(self._socket):
                return messages
            if self._is_lost:
                raise PageddError(
                    "daemon_unreachable", f"{self.path}: the daemon closed the connection; is it restarting?"
                )
            await self._poller.poll()

    def close(self, linger_ms: int = 0) -> None:
        """Closes the socket; what was sent may take `linger_ms` to leave."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=linger_ms)

    async def _take_events(self) -> None:
        for frames in await _waiting(self._monitor):
            if parse_monitor_message(frames)["event"] == zmq.Event.HANDSHAKE_SUCCEEDED:
                self._is_connected = True
            else:
                self._is_lost = True


async def _waiting(zmq_socket: zmq.asyncio.Socket) -> list[list[bytes]]:
    """The messages that have come, without waiting for more."""
    messages = []
    while int(zmq_socket.get(zmq.EVENTS)) & zmq.POLLIN:
        messages.append(await zmq_socket.recv_multipart(zmq.NOBLOCK))
    return messages


def probe(path: Path) -> None:
    """Asks the kernel whether somebody listens at `path`, which ZeroMQ would retry in silence.

    Raises `PageddError`: `daemon_unreachable` or `forbidden`.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as candidate:
        candidate.setblocking(False)
        try:
            candidate.connect(str(path))
        except BlockingIOError:
            return  # The listener's backlog is full: busy, but there.
        except PermissionError as error:
            raise PageddError(
                "forbidden", f"{path}: this user may not connect; join the group pagedd, or ask the service's owner"
            ) from error
        except OSError as error:
            raise PageddError(
                "daemon_unreachable",
                f"{path}: no daemon listens there ({error.strerror or error}); "
                "start one (systemctl start pagedd, or make run), or set PAGEDD_RUNTIME_DIR",
            ) from error
