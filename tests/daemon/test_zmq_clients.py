"""Clients over ZeroMQ that are too many, that leave and that do not read: it costs their own requests alone."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import uvloop
import zmq

from pagedd.client.endpoints import ipc
from pagedd.client.protocol import Delta, Done, Failed, Sampling
from pagedd.daemon import zmq_server

from .scripted_host import ScriptedHost
from .served import Served, ZmqClient, is_alive, prompt, serving
from .waiting import WAIT_S, until


@pytest.mark.parametrize("name", ["requests", "admin", "stats"])
@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_connections_beyond_the_bound_are_closed_and_those_within_it_go_on(
    socket_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    run: Callable[[Coroutine[Any, Any, None]], None],
) -> None:
    monkeypatch.setattr(zmq_server, "max_zmq_connections", lambda: 2)

    async def meet_the_bound() -> None:
        async with serving(socket_folder) as served:
            path = str(getattr(served.endpoints, name))
            opened = [await asyncio.open_unix_connection(path) for _ in range(5)]
            greetings = [await asyncio.wait_for(reader.read(10), WAIT_S) for reader, _ in opened[:2]]
            assert all(greeting.startswith(b"\xff") for greeting in greetings)
            for reader, _ in opened[2:]:
                await asyncio.wait_for(reader.read(), WAIT_S)  # to its end
            for _, writer in opened:
                writer.close()
            await asyncio.sleep(0.05)
            assert await is_alive(served)

    run(meet_the_bound())
    assert "limit 2" in caplog.text


async def test_a_client_that_leaves_stops_its_requests_in_whatever_state(served: Served) -> None:
    served.host.reply = lambda request: None
    async with served.client() as stays:
        await stays.say(prompt("stays"))
        await stays.hear()
        async with served.client() as leaves:
            for number in range(3):
                await leaves.say(prompt("leaves", str(number)))
            for _ in range(3):
                await leaves.hear()
            served.host.produce(served.host.submitted[1].request_id, b"x")
        await until(lambda: len(served.host.aborted) == 3)
        assert list(served.host.live) == [served.host.submitted[0].request_id]
        served.host.produce(served.host.submitted[0].request_id, b"y", finish_reason="length")
        assert isinstance(await stays.hear(), Delta)


async def test_two_hundred_clients_that_leave_after_five_tokens_leave_nothing_behind(served: Served) -> None:
    served.host.reply = lambda request: [97] * 2000
    for number in range(200):
        async with served.client() as client:
            await client.say(prompt(sampling=Sampling(max_tokens=2000)))
            for _ in range(6):
                await client.hear()
        async with served.client() as client:
            await client.say(prompt("b", str(number), sampling=Sampling(max_tokens=2), stream=False))
            assert isinstance(await client.hear_end(), Done)
    await until(lambda: not served.host.live)
    assert (await served.service.stats_frame(blocks=False)).requests == []


async def test_a_client_that_does_not_read_loses_its_requests_and_delays_nobody(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_server, "MAX_BACKLOG_BYTES", 100_000)
    served.host.reply = lambda request: None
    slow = served.context.socket(zmq.DEALER)
    slow.setsockopt(zmq.RCVHWM, 1)
    slow.connect(ipc(served.endpoints.requests))
    await ZmqClient(slow).say(prompt(sampling=Sampling(max_tokens=2000)))
    await until(lambda: bool(served.host.submitted))
    request_id = served.host.submitted[0].request_id
    for _ in range(5000):
        if request_id not in served.host.live:
            break
        served.host.produce(request_id, b"x" * 1000)
        await asyncio.sleep(0)
    assert served.host.aborted == [(request_id, None)]
    assert await is_alive(served)
    # When it reads at last, it hears what was kept and how it ended.
    end = await ZmqClient(slow).hear_end()
    slow.close(linger=0)
    assert isinstance(end, Failed)
    assert end.code == "client_too_slow"


async def test_clients_that_never_read_do_not_hold_up_the_end(socket_folder: Path) -> None:
    async with AsyncExitStack() as end:
        served = await end.enter_async_context(serving(socket_folder, ScriptedHost(reply=lambda request: None)))
        sleepers = []
        for _ in range(3):
            sleeper = served.context.socket(zmq.DEALER)
            sleeper.setsockopt(zmq.RCVHWM, 1)
            sleeper.connect(ipc(served.endpoints.requests))
            await ZmqClient(sleeper).say(prompt(sampling=Sampling(max_tokens=2000)))
            sleepers.append(sleeper)
        await until(lambda: len(served.host.submitted) == 3)
        for _ in range(2000):
            for request in served.host.submitted:
                served.host.produce(request.request_id, b"x" * 100)
        async with asyncio.timeout(WAIT_S):
            await end.aclose()
