"""The stats socket with a scripted engine: whoever looks, and however slowly, delays nobody."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from pagedd.bench.frames import FakeEngine
from pagedd.client.endpoints import ipc
from pagedd.client.protocol import Done, Generate, encode
from pagedd.client.stats_frame import StatsFrame, decode_stats
from pagedd.daemon import stats_feed
from pagedd.daemon.caller import Caller
from pagedd.daemon.frames import EVENTS_IN_A_FRAME
from pagedd.daemon.stats_feed import Pace
from pagedd.engine.stats import EngineSnapshot

from .scripted_host import ScriptedHost, engine_stats
from .served import Served, serving
from .waiting import WAIT_S

NUM_BLOCKS = 100_000


@pytest.fixture
async def served(socket_folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    """Pictures of a large pool, fifty times as often as else."""
    monkeypatch.setattr(stats_feed, "INTERVAL_S", 0.005)
    async with serving(socket_folder, ScriptedHost(stats=engine_stats(num_blocks=NUM_BLOCKS))) as running:
        yield running


@contextmanager
def subscriber(served: Served, **options: int) -> Iterator[zmq.asyncio.Socket]:
    socket = served.context.socket(zmq.SUB)
    for name, value in options.items():
        socket.setsockopt(getattr(zmq, name), value)
    socket.subscribe(b"")
    socket.connect(ipc(served.endpoints.stats))
    yield socket
    socket.close(linger=0)


async def seq(socket: zmq.asyncio.Socket) -> int:
    return decode_stats(await asyncio.wait_for(socket.recv(), WAIT_S)).seq


async def test_one_that_does_not_read_misses_pictures_and_the_others_get_them(served: Served) -> None:
    with subscriber(served, RCVHWM=1) as stopped, subscriber(served, CONFLATE=1) as reading:
        first = await seq(stopped)
        while (newest := await seq(reading)) < first + 100:
            pass
        waiting = [await seq(stopped) for _ in range(10)]
        # What lay in pipes and buffers is old, then there is a gap: nobody kept the rest for it.
        assert waiting[0] < newest
        assert any(later - earlier > 10 for earlier, later in pairwise(waiting))


async def test_requests_go_on_beside_one_that_does_not_read(served: Served) -> None:
    with subscriber(served, RCVHWM=1) as stopped:
        await seq(stopped)
        async with served.client() as client:
            for number in range(20):
                await client.say(Generate(id=str(number), prompt="ab"))
                assert isinstance(await client.hear_end(), Done)


async def test_pictures_are_made_only_while_somebody_looks(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    num_made = 0
    stats_frame = served.service.stats_frame

    async def counted(blocks: bool, viewer: Caller | None = None) -> object:
        nonlocal num_made
        num_made += 1
        return await stats_frame(blocks, viewer)

    monkeypatch.setattr(served.service, "stats_frame", counted)
    await asyncio.sleep(0.2)
    assert num_made == 0
    with subscriber(served, CONFLATE=1) as looking:
        frame = decode_stats(await asyncio.wait_for(looking.recv(), WAIT_S))
        assert frame.blocks is not None
        assert frame.model == "bytes"
        assert await seq(looking) > frame.seq
    # That it has gone is heard after some time; a feed that goes on for nobody never stops.
    num_before = 0
    async with asyncio.timeout(WAIT_S):
        while num_before != num_made:
            num_before = num_made
            await asyncio.sleep(0.3)


async def test_a_picture_that_cannot_be_made_is_logged_and_the_next_one_comes(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stats_frame = served.service.stats_frame
    faults = [RuntimeError("once")]

    async def fails_once(blocks: bool, viewer: Caller | None = None) -> object:
        if faults:
            raise faults.pop()
        return await stats_frame(blocks, viewer)

    monkeypatch.setattr(served.service, "stats_frame", fails_once)
    with caplog.at_level(logging.ERROR), subscriber(served) as looking:
        await seq(looking)
    assert "a stats frame could not be made" in caplog.text


async def test_a_frame_stays_small_whatever_happens(served: Served) -> None:
    for number in range(10_000):
        served.service.events.add("cancel", "its client is gone", f"{number:016x}")
    frame = await served.service.stats_frame(blocks=True)
    assert len(frame.events) == EVENTS_IN_A_FRAME
    blocks = frame.blocks
    assert blocks is not None
    bytes_of_blocks = sum(map(len, (blocks.states, blocks.ref_counts, blocks.fills, blocks.ages)))
    assert bytes_of_blocks <= 4 * NUM_BLOCKS
    assert len(encode(frame)) < bytes_of_blocks + 10_000


async def test_a_driver_that_hangs_costs_the_machine_and_no_picture(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = asyncio.Event()
    loop = asyncio.get_running_loop()

    def hangs() -> None:
        asyncio.run_coroutine_threadsafe(may_end.wait(), loop).result(WAIT_S)

    monkeypatch.setattr(served.service, "read_machine", hangs)
    frame = await asyncio.wait_for(served.service.stats_frame(blocks=False), WAIT_S)
    assert frame.machine is not None
    assert frame.machine.memory_total_bytes is None
    assert frame.figures["num_blocks"] == NUM_BLOCKS
    may_end.set()


@pytest.mark.parametrize("turns", range(4))
async def test_whoever_gives_a_picture_up_as_the_engine_answers_is_rid_of_it(
    served: Served, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    snapshot, answer = await served.host.snapshot(), asyncio.get_running_loop().create_future()
    is_asked = asyncio.Event()

    async def ask() -> EngineSnapshot:
        is_asked.set()
        return await answer

    monkeypatch.setattr(served.host, "snapshot", ask)
    picture = asyncio.create_task(served.service.stats_frame(blocks=False))
    await asyncio.wait_for(is_asked.wait(), WAIT_S)
    answer.set_result(snapshot)
    for _ in range(turns):
        await asyncio.sleep(0)
    is_given_up = picture.cancel()  # False once it is done
    await asyncio.wait([picture])
    assert picture.cancelled() == is_given_up


def computing(cpu_percent: float | None, num_running: int = 1) -> StatsFrame:
    frame = FakeEngine().frame()
    assert frame.machine is not None
    frame.machine.cpu_percent = cpu_percent
    frame.figures["num_requests_running"] = num_running
    return frame


def test_pictures_are_few_from_when_a_model_on_the_cpu_has_all_cores_until_it_has_not() -> None:
    pace = Pace()
    busy = [89.0, 90.0, 100.0, 75.0, 74.9, 89.0, None]
    assert [pace.interval_s(computing(percent), "cpu") for percent in busy] == [0.25, 2.0, 2.0, 2.0, 0.25, 0.25, 0.25]


def test_pictures_come_as_ever_while_nobody_computes_or_a_gpu_does() -> None:
    assert Pace().interval_s(computing(100.0), "cuda:0") == 0.25
    assert Pace().interval_s(computing(100.0), None) == 0.25
    pace = Pace()
    assert pace.interval_s(computing(100.0), "cpu") == 2.0
    assert pace.interval_s(computing(100.0, num_running=0), "cpu") == 0.25


async def test_a_picture_says_when_the_next_comes_and_a_newcomer_does_not_wait_for_it(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stats_feed.Pace, "interval_s", lambda pace, frame, device: 3600.0)

    async def frame(socket: zmq.asyncio.Socket) -> StatsFrame:
        return decode_stats(await asyncio.wait_for(socket.recv(), WAIT_S))

    with subscriber(served) as first:
        assert (await frame(first)).interval_s == 3600.0
        with subscriber(served) as newcomer:
            assert (await frame(newcomer)).seq == (await frame(first)).seq
            assert await first.poll(100) == 0, "one picture for a newcomer, and then the old pace"
