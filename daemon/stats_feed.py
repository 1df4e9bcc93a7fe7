"""The stats socket: a picture of the daemon four times a second, made only while somebody looks.

A slow subscriber misses pictures and delays nobody. What is in a picture is `frames.py`'s.
"""

import asyncio
import logging
from pathlib import Path

import zmq

from pagedd.client.protocol import encode
from pagedd.daemon import activation
from pagedd.daemon.runtime_dir import REQUESTS_MODE
from pagedd.daemon.service import Service
from pagedd.daemon.zmq_connections import ConnectionMonitor

log = logging.getLogger(__name__)

INTERVAL_S = 0.25
# Two pictures under way for each subscriber; a third is dropped. Subscribers keep only the newest (CONFLATE).
_SEND_HIGH_WATER = 2
# Other work of the event loop gets its turn after so many subscriptions.
_MAX_MESSAGES_A_TURN = 64


class StatsFeed:
    """Publishes `service.stats_frame(blocks=True)` on an XPUB socket. `connections` are those to it."""

    def __init__(
        self,
        service: Service,
        context: "zmq.Context[zmq.Socket[bytes]]",
        path: Path,
        inherited: activation.Inherited,
    ) -> None:
        """Binds `path`. Raises `zmq.ZMQError` when it is taken."""
        self._service = service
        self._topics: set[bytes] = set()
        self._has_subscribers = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._turn: asyncio.Handle | None = None
        self._socket = context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.SNDHWM, _SEND_HIGH_WATER)
        # A subscription is short; nothing else is expected from this side.
        self._socket.setsockopt(zmq.MAXMSGSIZE, 1024)
        self.connections = ConnectionMonitor(self._socket, path)
        activation.bind(self._socket, path, REQUESTS_MODE, inherited)
        self._loop.add_reader(self._socket.fileno(), self._read_subscriptions)
        self._loop.add_reader(self.connections.fileno(), self.connections.read)
        # A descriptor tells of what comes after the last look, so there must be a first one.
        self._read_subscriptions()
        self.connections.read()
        self._publisher = self._loop.create_task(self._publish(), name="stats feed")

    async def close(self) -> None:
        self._publisher.cancel()
        await asyncio.wait([self._publisher])
        if self._turn is not None:
            self._turn.cancel()
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_reader(self.connections.fileno())
        self.connections.close()
        self._socket.close(linger=0)

    async def _publish(self) -> None:
        while True:
            await self._has_subscribers.wait()
            due_s = self._loop.time() + INTERVAL_S
            try:
                payload = encode(await self._service.stats_frame(blocks=True))
                self._socket.send(payload, zmq.NOBLOCK)
            except zmq.Again:
                pass  # XPUB drops for slow subscribers; this is a queue that is full for all
            except Exception:
                # The next picture may be fine, and nobody's request depends on this one.
                log.exception("a stats frame could not be made")
            # Sending may have taken the notice of a subscription with it.
            self._read_subscriptions()
            await asyncio.sleep(max(0.0, due_s - self._loop.time()))

    def _read_subscriptions(self) -> None:
        """XPUB hears `\\x01topic` for the first subscriber of a topic and `\\x00topic` when its last is gone."""
        for _ in range(_MAX_MESSAGES_A_TURN):
            try:
                message = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            if message[:1] == b"\x01":
                self._topics.add(message[1:])
            elif message[:1] == b"\x00":
                self._topics.discard(message[1:])
        else:
            self._turn = self._loop.call_soon(self._read_subscriptions)
        if self._topics:
            self._has_subscribers.set()
        else:
            self._has_subscribers.clear()
