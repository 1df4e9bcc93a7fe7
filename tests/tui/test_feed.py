"""The live source: it gives frames, says when the daemon is gone, and comes back by itself."""

import asyncio
import queue
import threading
import time
from pathlib import Path

import pytest
import zmq

from pagedd.bench.frames import FakeEngine
from pagedd.client.endpoints import Endpoints, ipc
from pagedd.client.protocol import encode
from pagedd.client.stats_frame import StatsFrame
from pagedd.tui import feed
from pagedd.tui.feed import LiveFeed, Update
from pagedd.tui.state import Link


class Publisher:
    """A stats socket in a thread, which publishes the same frame again and again, unless it `is_silent`."""

    def __init__(self, directory: Path) -> None:
        self._path = Endpoints(directory).stats
        self._payload = encode(FakeEngine(num_blocks=16, num_requests=1).frame())
        self._commands: queue.Queue[str] = queue.Queue()
        self._thread: threading.Thread | None = None
        self.num_sent = 0
        self.is_silent = False

    def open(self) -> None:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        if self._thread is not None:
            self._commands.put("stop")
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.PUB)
        socket.bind(ipc(self._path))
        while self._commands.empty():
            if not self.is_silent:
                socket.send(self._payload)
                self.num_sent += 1
            time.sleep(0.02)
        self._commands.get()
        context.destroy(linger=0)


async def until(updates: "asyncio.Queue[Update]", kind: type) -> Update:
    async with asyncio.timeout(20):
        while True:
            update = await updates.get()
            if isinstance(update, kind):
                return update


async def test_a_daemon_that_goes_and_comes_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "FIRST_RETRY_S", 0.05)
    publisher, live = Publisher(tmp_path), LiveFeed(str(tmp_path))
    updates: asyncio.Queue[Update] = asyncio.Queue()

    async def watch() -> None:
        async for update in live.updates():
            updates.put_nowait(update)

    watching = asyncio.create_task(watch())
    try:
        lost = await until(updates, Link)
        assert isinstance(lost, Link)
        assert lost.state == "lost"
        assert "no daemon listens there" in lost.error
        await asyncio.to_thread(publisher.open)
        await until(updates, StatsFrame)
        await asyncio.to_thread(publisher.close)
        assert (await until(updates, Link)).state == "lost"  # type: ignore[union-attr]
        await asyncio.to_thread(publisher.open)
        await until(updates, StatsFrame)
    finally:
        watching.cancel()
        await asyncio.to_thread(publisher.close)
        await live.close()


async def test_tries_come_ever_more_slowly_up_to_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(feed.asyncio, "sleep", sleep)
    monkeypatch.setattr(feed.random, "uniform", lambda low, high: 1.0)
    live = LiveFeed(str(tmp_path))
    async for _ in live.updates():
        if len(waits) == 12:
            break
    assert waits[:3] == pytest.approx([0.5, 0.8, 1.28])
    assert waits[-1] == feed.LAST_RETRY_S


async def test_a_place_that_can_be_no_socket_is_lost_with_the_reason() -> None:
    live = LiveFeed("/tmp/" + "x" * 200)
    assert live.place.startswith("/tmp/xxx")
    lost = await anext(live.updates())
    assert isinstance(lost, Link)
    assert "limit 107" in lost.error
    await live.close()


async def test_whoever_records_gets_every_frame_however_slowly_they_are_taken(tmp_path: Path) -> None:
    live = LiveFeed(str(tmp_path))
    publisher = Publisher(tmp_path)
    publisher.open()
    try:
        updates = live.updates()
        live.gives_every_frame = True
        while not isinstance(await anext(updates), StatsFrame):
            pass
        num_sent = publisher.num_sent + 20
        while publisher.num_sent < num_sent:  # noqa: ASYNC110 (a thread sets no event)
            await asyncio.sleep(0.02)
        publisher.is_silent = True
        # Were they not kept, the newest alone would be there.
        async with asyncio.timeout(20):
            assert all([isinstance(await anext(updates), StatsFrame) for _ in range(10)])
    finally:
        await updates.aclose()  # type: ignore[attr-defined]
        await live.close()
        publisher.close()
