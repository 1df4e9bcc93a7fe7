"""The live source: it gives frames, says when the daemon is gone, and comes back by itself."""

import asyncio
import queue
import threading
from pathlib import Path

import pytest
import zmq

from pagedd.bench.frames import FakeEngine
from pagedd.client.endpoints import Endpoints, ipc
from pagedd.client.protocol import encode
from pagedd.client.stats_frame import StatsFrame
from pagedd.tui import feed
from pagedd.tui.feed import LONGEST_REST_S, REST_S, LiveFeed, Pace, Update
from pagedd.tui.state import GREY_S, Link


class Publisher:
    """A stats socket in a thread, which publishes the same frame again and again while it is open."""

    def __init__(self, directory: Path) -> None:
        self._path = Endpoints(directory).stats
        self._payload = encode(FakeEngine(num_blocks=16, num_requests=1).frame())
        self._commands: queue.Queue[str] = queue.Queue()
        self._thread: threading.Thread | None = None

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
            socket.send(self._payload)
            threading.Event().wait(0.02)
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


@pytest.mark.parametrize(("cpu_percent", "is_crowded"), [(None, False), (87.0, False), (90.0, True), (100.0, True)])
def test_only_a_machine_without_an_idle_core_is_given_way_to(cpu_percent: float | None, is_crowded: bool) -> None:
    frame = FakeEngine().frame()
    assert frame.machine is not None
    frame.machine.cpu_percent = cpu_percent
    assert feed.is_crowded(frame) is is_crowded


async def test_a_place_that_can_be_no_socket_is_lost_with_the_reason() -> None:
    live = LiveFeed("/tmp/" + "x" * 200)
    assert live.place.startswith("/tmp/xxx")
    lost = await anext(live.updates())
    assert isinstance(lost, Link)
    assert "limit 107" in lost.error
    await live.close()


def test_a_frame_without_a_machine_is_no_reason_to_give_way() -> None:
    frame = FakeEngine().frame()
    frame.machine = None
    assert not feed.is_crowded(frame)


def test_a_rest_makes_up_for_what_was_used_within_bounds() -> None:
    frame = FakeEngine().frame()
    assert frame.machine is not None
    frame.machine.cpu_percent = 95.0
    used_s = 0.4
    pace = Pace(lambda: used_s)
    assert pace.rest_s(frame) == REST_S, "what starting has cost is not made up for"
    for drawn_s, rest_s in ((0.001, REST_S), (0.004, 2.0), (0.006, 3.0), (0.1, LONGEST_REST_S)):
        used_s += drawn_s
        assert pace.rest_s(frame) == pytest.approx(rest_s)
    frame.machine.cpu_percent = 40.0
    used_s += 0.006
    assert pace.rest_s(frame) == 0.0
    assert GREY_S > LONGEST_REST_S + 1, "who rests does not look dead"


async def test_whoever_records_gets_every_frame_however_slowly_they_are_taken(tmp_path: Path) -> None:
    live = LiveFeed(str(tmp_path))
    publisher = Publisher(tmp_path)
    publisher.open()
    try:
        updates = live.updates()
        live.gives_every_frame = True
        while not isinstance(await anext(updates), StatsFrame):
            pass
        # Twenty are said meanwhile; without them the newest alone would wait.
        await asyncio.sleep(0.4)
        taken = [anext(updates) for _ in range(10)]
        async with asyncio.timeout(0.15):
            assert all([isinstance(await update, StatsFrame) for update in taken])
    finally:
        await updates.aclose()  # type: ignore[attr-defined]
        await live.close()
        publisher.close()


async def test_on_a_crowded_machine_frames_are_taken_with_rests_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rests: list[float] = []
    monkeypatch.setattr(feed, "CROWDED_PERCENT", 0.0)
    monkeypatch.setattr(feed, "REST_S", 0.001)
    monkeypatch.setattr(feed, "CROWDED_SHARE", 1e9)
    rest = asyncio.sleep

    async def sleep(seconds: float) -> None:
        rests.append(seconds)
        await rest(seconds)

    publisher, live = Publisher(tmp_path), LiveFeed(str(tmp_path))
    publisher.open()
    try:
        updates = live.updates()
        while not isinstance(await anext(updates), StatsFrame):
            pass
        monkeypatch.setattr(feed.asyncio, "sleep", sleep)
        assert isinstance(await anext(updates), StatsFrame)
        assert rests == [0.001]
    finally:
        monkeypatch.undo()
        await updates.aclose()  # type: ignore[attr-defined]
        await live.close()
        publisher.close()
