"""The stats socket: a picture of the daemon four times a second, made only while somebody looks.

A slow subscriber misses pictures and delays nobody. Nor do those who look delay what they look at: while a model on the
CPU has all cores, pictures are so few that making, sending and drawing them takes next to nothing from it. Each says
when the next is due. What is in a picture is `frames.py`'s.
"""

import asyncio
import contextlib
import logging
from pathlib import Path

from pagedd.client.protocol import encode
from pagedd.client.stats_frame import StatsFrame
from pagedd.daemon import zmtp
from pagedd.daemon.activation import Inherited
from pagedd.daemon.runtime_dir import REQUESTS_MODE
from pagedd.daemon.service import Service
from pagedd.daemon.zmq_server import Handler, HeldBytes, Peer, Server
from pagedd.daemon.zmtp import SocketKind, Subscription

log = logging.getLogger(__name__)

INTERVAL_S = 0.25
# Three viewers then cost a model that computes on two cores a half of a hundredth of its time: 0.45 to 0.62 %
# (bench/watched_pictures.py).
SATURATED_INTERVAL_S = 2.0
# Busy share of all cores together from which on they are taken for saturated, and below which not any more.
_SATURATED_PERCENT, _RELIEVED_PERCENT = 90.0, 75.0
# To everything is the one topic that gets pictures.
_MAX_TOPICS, _MAX_TOPIC_BYTES = 4, 64
# A subscription is short; nothing else is expected from this side.
KIND = SocketKind(b"PUB", peers=frozenset({b"SUB", b"XSUB"}), max_message_bytes=1 + _MAX_TOPIC_BYTES, max_frames=1)


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


class StatsFeed(Handler):
    """Publishes `service.stats_frame(blocks=True)` to whoever subscribes at `path`."""

    def __init__(self, service: Service, path: Path, held: HeldBytes) -> None:
        self._service = service
        self._topics: dict[Peer, set[bytes]] = {}  # of those that have any
        self._has_subscribers = asyncio.Event()
        self._newcomer = asyncio.Event()
        self._pace = Pace()
        self._loop = asyncio.get_running_loop()
        self._server = Server(KIND, path, self, held)
        self._publisher = self._loop.create_task(self._publish(), name="stats feed")

    async def start(self, inherited: Inherited) -> None:
        """Raises `OSError`."""
        await self._server.start(REQUESTS_MODE, inherited)

    async def close(self) -> None:
        self._publisher.cancel()
        await asyncio.wait([self._publisher])
        await self._server.close(linger_s=0)

    def on_subscription(self, peer: Peer, subscription: Subscription) -> None:
        topics = self._topics.setdefault(peer, set())
        if subscription.is_wanted:
            topics.add(subscription.topic)
            # It should not wait for its picture.
            self._newcomer.set()
        else:
            topics.discard(subscription.topic)
        if len(topics) > _MAX_TOPICS or len(subscription.topic) > _MAX_TOPIC_BYTES:
            log.warning(
                "a subscriber of %s is closed: over %d topics, or one of over %d bytes",
                peer.caller.name, _MAX_TOPICS, _MAX_TOPIC_BYTES,
            )  # fmt: skip
            peer.end()
        if not topics:
            del self._topics[peer]
        self._look_for_subscribers()

    def on_gone(self, peer: Peer) -> None:
        self._topics.pop(peer, None)
        self._look_for_subscribers()

    def _look_for_subscribers(self) -> None:
        if self._topics:
            self._has_subscribers.set()
        else:
            self._has_subscribers.clear()

    async def _publish(self) -> None:
        while True:
            await self._has_subscribers.wait()
            begun_s, interval_s = self._loop.time(), INTERVAL_S
            self._newcomer.clear()
            try:
                frame = await self._service.stats_frame(blocks=True)
                info = self._service.host.info
                interval_s = frame.interval_s = self._pace.interval_s(frame, info.device if info is not None else None)
                self._send(encode(frame))
            except Exception:
                # The next picture may be fine, and nobody's request depends on this one.
                log.exception("a stats frame could not be made")
            await asyncio.sleep(max(0.0, begun_s + INTERVAL_S - self._loop.time()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(begun_s + interval_s):
                    await self._newcomer.wait()

    def _send(self, frame: bytes) -> None:
        encoded = zmtp.message([frame])
        for peer, topics in self._topics.items():
            if any(map(frame.startswith, topics)):
                peer.send_newest(encoded)
