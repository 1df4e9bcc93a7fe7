"""A daemon that is not there, does not answer, goes or talks nonsense, as the asyncio client tells it."""

import asyncio
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from pagedd.client import AsyncClient, PageddError, protocol
from pagedd.client.protocol import Delta, Failed, Generate, Ping

from .fake_daemon import FakeDaemon


async def test_without_a_daemon_every_call_says_so_at_once(directory: Path) -> None:
    client = AsyncClient(directory)
    for call in (client.ping, client.stats, client.generate("x").result, client.watch_stats().__anext__):
        with pytest.raises(PageddError, match=r"daemon_unreachable: .*/(pagedd|stats)\.sock: no daemon listens there"):
            await call()
    with pytest.raises(PageddError, match="daemon_unreachable"):
        await client.cancel("r1")


async def test_a_socket_that_nobody_listens_on_any_more_is_no_daemon(directory: Path) -> None:
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(directory / "pagedd.sock"))
    with pytest.raises(PageddError, match=r"daemon_unreachable: .*Connection refused"):
        await AsyncClient(directory).ping()


async def test_a_listener_that_never_shakes_hands_is_given_up(directory: Path) -> None:
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(directory / "pagedd.sock"))
        mute.listen()
        with pytest.raises(PageddError, match=r"daemon_unreachable: .*did not answer as pagedd within 0.2 s"):
            await AsyncClient(directory, timeout_s=0.2).ping()


async def test_a_socket_that_may_not_be_opened_is_forbidden(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(self: socket.socket, path: str) -> None:
        raise PermissionError

    monkeypatch.setattr("pagedd.client.link.socket.socket.connect", connect, raising=False)
    with pytest.raises(PageddError, match=r"forbidden: .*join the group pagedd"):
        await AsyncClient(directory).ping()


async def test_a_daemon_that_does_not_answer_is_given_up(daemon: FakeDaemon, directory: Path) -> None:
    daemon.answer = lambda message: []
    async with AsyncClient(directory, timeout_s=1.0) as client:  # of which the handshake has its part
        with pytest.raises(PageddError, match=r"daemon_unreachable: .*no answer within 1 s"):
            await client.ping()


async def test_when_the_daemon_goes_every_waiting_call_fails(daemon: FakeDaemon, directory: Path) -> None:
    daemon.answer = lambda message: [Delta(id=message.id, text="a")] if isinstance(message, Generate) else []

    async def read(client: AsyncClient) -> list[str]:
        texts = []
        try:
            async for delta in client.generate("x"):
                texts.append(delta.text)
        except PageddError as error:
            texts.append(error.code)
        return texts

    async with AsyncClient(directory) as client:
        waiting = [
            asyncio.ensure_future(work)
            for work in (read(client), client.generate("y").result(), client.stats(), client.ping())
        ]
        await asyncio.to_thread(daemon.hear, Ping)
        daemon.stop()
        texts, *failures = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 10)
    assert texts == ["a", "daemon_unreachable"]
    assert all(isinstance(failure, PageddError) and failure.code == "daemon_unreachable" for failure in failures)


async def test_a_watcher_fails_when_the_daemon_goes(daemon: FakeDaemon, directory: Path) -> None:
    watching = asyncio.ensure_future(anext(AsyncClient(directory).watch_stats()))
    await asyncio.sleep(0.1)
    daemon.stop()
    with pytest.raises(PageddError, match="daemon_unreachable"):
        await asyncio.wait_for(watching, 10)


async def test_what_the_daemon_said_before_it_went_is_not_lost(daemon: FakeDaemon, directory: Path) -> None:
    def answer(message: Any) -> list[Any]:
        threading.Thread(target=daemon.stop).start()
        return [Failed(id=message.id, code="shutting_down", message="the daemon is stopping")]

    daemon.answer = answer
    async with AsyncClient(directory) as client:
        with pytest.raises(PageddError, match="shutting_down"):
            await asyncio.wait_for(client.generate("x").result(), 10)


async def test_the_client_serves_again_after_the_daemon_came_back(daemon: FakeDaemon, directory: Path) -> None:
    async with AsyncClient(directory) as client:
        await client.ping()
        daemon.stop()
        with pytest.raises(PageddError, match="daemon_unreachable"):
            await client.ping()
        again = FakeDaemon(directory)
        assert (await client.generate("x")).choices[0].text == "one two three"
        again.stop()


@pytest.mark.parametrize("nonsense", [b"\xc1", b"", protocol.encode(Ping(id="1"))])
async def test_words_that_this_client_cannot_read_end_what_waits(
    daemon: FakeDaemon, directory: Path, nonsense: bytes
) -> None:
    def answer(message: Any) -> list[Any]:
        daemon.say(nonsense)
        return []

    daemon.answer = answer
    async with AsyncClient(directory) as client:
        with pytest.raises(PageddError, match="protocol_version"):
            await asyncio.wait_for(client.generate("x").result(), 10)
