"""A daemon that is still loading its model: requests wait for it within bounds, or are refused at once."""

import asyncio
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagedd.client import AsyncClient, PageddError, load_wait, pagectl
from pagedd.client.protocol import Cancel, Chat, ClientMessage, Failed, Generate, Ping, Pong, Waking
from pagedd.client.sync import Client

from .fake_daemon import FakeDaemon

NOTE = "pagectl: the daemon is loading its model; waiting for it (--no-wait fails at once)\n"


@pytest.fixture(autouse=True)
def polls_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_wait, "_POLL_S", 0.01)


@pytest.fixture
def loading(daemon: FakeDaemon) -> Callable[[list[str]], None]:
    """`loading(states)`: what each `Ping` hears in turn; requests are refused until the states are used up."""

    def script(states: list[str]) -> None:
        def answer(message: ClientMessage) -> list[Any]:
            match message:
                case Generate() | Chat() if states:
                    return [Failed(id=message.id, code="engine_loading", message=f"{states[0]}; try again shortly")]
                case Ping() if states:
                    return [Pong(id=message.id, version="0.1.0", state=states.pop(0))]
            return daemon.default_answer(message)

        daemon.answer = answer

    return script


def for_ever(daemon: FakeDaemon) -> None:
    def answer(message: ClientMessage) -> list[Any]:
        if isinstance(message, Ping):
            return [Pong(id=message.id, version="0.1.0", state="loading")]
        return [Failed(id=message.id, code="engine_loading", message="loading, 43 %")]

    daemon.answer = answer


def num_heard(daemon: FakeDaemon, kind: type) -> int:
    return sum(isinstance(message, kind) for _, message in list(daemon.heard.queue))


async def test_a_request_waits_without_being_sent_again_until_the_daemon_may_be_ready(
    daemon: FakeDaemon, directory: Path, loading: Callable[[list[str]], None]
) -> None:
    loading(["starting", "loading", "restarting", "loading"])
    begun = []
    async with AsyncClient(directory, on_load_wait=lambda: begun.append(1)) as client:
        assert [delta.text async for delta in client.generate("x")] == ["one", " two", " three"]
    assert begun == [1]
    assert num_heard(daemon, Generate) == 2


async def test_one_that_is_refused_again_though_the_daemon_is_ready_goes_on_waiting(
    daemon: FakeDaemon, directory: Path, loading: Callable[[list[str]], None]
) -> None:
    loading(["ready", "ready"])
    begun = []
    async with AsyncClient(directory, on_load_wait=lambda: begun.append(1)) as client:
        assert (await client.chat([{"role": "user", "content": "x"}])).choices[0].text == "one two three"
    assert begun == [1]
    assert num_heard(daemon, Chat) == 3


async def test_the_wait_ends_at_its_limit_with_a_fresh_refusal(daemon: FakeDaemon, directory: Path) -> None:
    for_ever(daemon)
    async with AsyncClient(directory, load_wait_s=0.05) as client:
        with pytest.raises(PageddError, match="engine_loading: loading, 43 %"):
            await client.generate("x")
    assert num_heard(daemon, Generate) == 2


def test_the_blocking_client_can_refuse_to_wait(daemon: FakeDaemon, directory: Path) -> None:
    for_ever(daemon)
    with Client(directory, load_wait_s=0) as client, pytest.raises(PageddError, match="engine_loading"):
        client.generate("x").result()
    assert num_heard(daemon, Ping) == 0


async def test_cancelling_ends_the_wait_at_once(daemon: FakeDaemon, directory: Path) -> None:
    for_ever(daemon)
    begun = asyncio.Event()
    async with AsyncClient(directory, on_load_wait=begun.set) as client:
        generation = client.generate("x")
        reading = asyncio.create_task(generation.result())
        await begun.wait()
        await asyncio.sleep(0)
        await client.cancel(generation)
        with pytest.raises(PageddError, match="engine_loading: the request was cancelled"):
            await reading


async def test_a_daemon_that_ends_while_it_loads_ends_the_wait(daemon: FakeDaemon, directory: Path) -> None:
    for_ever(daemon)
    begun = asyncio.Event()
    async with AsyncClient(directory, on_load_wait=begun.set) as client:
        reading = asyncio.create_task(client.generate("x").result())
        await begun.wait()
        await asyncio.to_thread(daemon.stop)
        with pytest.raises(PageddError, match="daemon_unreachable"):
            await reading


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_pagectl_waits_and_says_so(
    directory: Path,
    loading: Callable[[list[str]], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    loading(["loading", "loading"])
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"x\n"), encoding="utf-8"))
    assert pagectl.main(["--runtime-dir", str(directory), command]) == 0
    assert capsys.readouterr() == ("one two three\n", NOTE)


def test_pagectl_that_is_not_to_wait_fails_at_once(
    daemon: FakeDaemon, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for_ever(daemon)
    assert pagectl.main(["--runtime-dir", str(directory), "generate", "x", "--no-wait"]) == 75
    assert capsys.readouterr().err == "pagectl: engine_loading: loading, 43 %\n"


def is_waking(daemon: FakeDaemon, *, wakes: bool) -> None:
    def answer(message: ClientMessage) -> list[Any]:
        if isinstance(message, Generate | Chat):
            held = Waking(id=message.id, request_id="r1")
            return [held, *daemon.default_answer(message)] if wakes else [held]
        answers: list[Any] = daemon.default_answer(message)
        return answers

    daemon.answer = answer


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_pagectl_says_so_while_the_engine_wakes(
    daemon: FakeDaemon,
    directory: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    is_waking(daemon, wakes=True)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"x\n"), encoding="utf-8"))
    assert pagectl.main(["--runtime-dir", str(directory), command]) == 0
    assert capsys.readouterr() == ("one two three\n", NOTE)


def test_pagectl_that_is_not_to_wait_fails_at_once_while_the_engine_wakes_and_takes_its_request_back(
    daemon: FakeDaemon, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    is_waking(daemon, wakes=False)
    assert pagectl.main(["--runtime-dir", str(directory), "generate", "x", "--no-wait"]) == 75
    assert capsys.readouterr().err == "pagectl: engine_loading: the engine slept and is waking; try again shortly\n"
    daemon.hear(Cancel)


async def test_the_wait_for_an_engine_that_wakes_has_the_same_limit(daemon: FakeDaemon, directory: Path) -> None:
    is_waking(daemon, wakes=False)
    async with AsyncClient(directory, load_wait_s=0.05) as client:
        with pytest.raises(PageddError, match="engine_loading: the engine slept"):
            await client.generate("x")
