"""The stats socket: a picture of the daemon four times a second, made only while somebody looks.

A slow subscriber misses pictures and delays nobody. Nor do those who look delay what they look at: while a model on the
CPU has all cores, pictures are so few that making, sending and drawing them takes next to nothing from it. Each says
when the next is due. What is in a picture is `frames.py`'s.
"""

import asyncio
import contextlib
import logging
from pathlib import Path

import zmq

from pagedd.client.protocol import encode
from pagedd.client.stats_frame import StatsFrame
from pagedd.daemon import activation
from pagedd.daemon.runtime_dir import REQUESTS_MODE
from pagedd.daemon.service import Service
from pagedd.daemon.zmq_connections import ConnectionMonitor

log = logging.getLogger(__name__)

INTERVAL_S = 0.25
# Three viewers then cost a model that computes on two cores a half of a hundredth of its time: 0.45 to 0.62 %
# (bench/watched_pictures.py).
SATURATED_INTERVAL_S = 2.0
# Busy share of all cores together from which on they are taken for saturated, and below which not any more.
_SATURATED_PERCENT, _RELIEVED_PERCENT = 90.0, 75.0
# Two pictures under way for each subscriber; a third is dropped. Subscribers keep only the newest (CONFLATE).
_SEND_HIGH_WATER = 2
# Other work of the event loop gets its turn after so many subscriptions.
_MAX_MESSAGES_A_TURN = 64


class Pace:
    """How long until the next picture."""

    def __init__(self) -> None:
        self._is_saturated = False

    def interval_s(self, frame: StatsFrame, device: str | None) -> float:
        """To be asked once a picture. `device` is the engine's (`cpu`, `cuda:0`); None while there is none."""
        percent = frame.machine.cpu_percent if frame.machine is not None else None
        is_computing = device == "cpu" and bool(frame.figures.get("num_requests_running"))
        bar = _RELIEVED_PERCENT if self._is_saturated else _SATURATED_PERCENT
        self._is_saturated = is_computing and percent is not None and percent >= bar
        return SATURATED_INTERVAL_S if self._is_saturated else INTERVAL_S


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
        self._newcomer = asyncio.Event()
        self._pace = Pace()
        self._loop = asyncio.get_running_loop()
        self._turn: asyncio.Handle | None = None
        self._socket = context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.SNDHWM, _SEND_HIGH_WATER)
        # Each subscription is told, also to a topic that has subscribers: a newcomer should not wait for its picture.
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)
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
            begun_s, interval_s = self._loop.time(), INTERVAL_S
            self._newcomer.clear()
            try:
                frame = await self._service.stats_frame(blocks=True)
                info = self._service.host.info
                interval_s = frame.interval_s = self._pace.interval_s(frame, info.device if info is not None else None)
                self._socket.send(encode(frame), zmq.NOBLOCK)
            except zmq.Again:
                pass  # XPUB drops for slow subscribers; this is a queue that is full for all
            except Exception:
                # The next picture may be fine, and nobody's request depends on this one.
                log.exception("a stats frame could not be made")
            # Sending may have taken the notice of a subscription with it.
            self._read_subscriptions()
            await asyncio.sleep(max(0.0, begun_s + INTERVAL_S - self._loop.time()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(begun_s + interval_s):
                    await self._newcomer.wait()

    def _read_subscriptions(self) -> None:
        """XPUB hears `\\x01topic` for each subscriber of a topic and `\\x00topic` when the last is gone."""
        for _ in range(_MAX_MESSAGES_A_TURN):
            try:
                message = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            if message[:1] == b"\x01":
                self._topics.add(message[1:])
                self._newcomer.set()
            elif message[:1] == b"\x00":
                self._topics.discard(message[1:])
        else:
            self._turn = self._loop.call_soon(self._read_subscriptions)
        if self._topics:
            self._has_subscribers.set()
        else:
            self._has_subscribers.clear()
