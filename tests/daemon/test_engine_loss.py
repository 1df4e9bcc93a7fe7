"""An engine that dies, stalls or hangs: what is told of it, what it costs, and the engine after it."""

import asyncio
import os
import re
import signal

import psutil
import pytest

from pagedd.client.errors import PageddError
from pagedd.daemon.engine_child import EngineChild
from pagedd.daemon.engine_state import EngineState
from pagedd.daemon.engine_watch import SilenceLimits

from .fake_engine import Prompt
from .recorded_host import StartHost, request
from .waiting import until


@pytest.mark.parametrize("deadly", [Prompt.CRASH, Prompt.VANISH])
async def test_an_engine_that_dies_is_replaced_and_its_loss_told_once(start_host: StartHost, deadly: int) -> None:
    engine = await start_host()
    engine.host.submit(request("a", deadly))
    await until(lambda: engine.host.state is EngineState.RESTARTING)
    with pytest.raises(PageddError, match=r"^engine_died: the engine process \(pid \d+\) ended with status (70|9)"):
        engine.host.submit(request("b", 5))
    await until(lambda: engine.host.state is EngineState.READY)
    assert len(engine.lost) == 1
    engine.host.submit(request("c", 5))
    await until(lambda: engine.tokens_of("c") == [6, 7, 8])
    assert ("scripted fault" in engine.host.trace) == (deadly is Prompt.CRASH)


async def test_a_killed_engine_is_named_with_its_signal(start_host: StartHost) -> None:
    engine = await start_host()
    assert engine.host.pid is not None
    os.kill(engine.host.pid, signal.SIGKILL)
    await until(lambda: bool(engine.lost))
    assert "was ended by SIGKILL" in engine.lost[0]


async def test_a_snapshot_that_waits_for_a_dying_engine_fails(start_host: StartHost) -> None:
    engine = await start_host()
    engine.host.submit(request("a", Prompt.HANG))
    # Time to begin the step that never ends; commands that arrive together are all obeyed before it.
    await asyncio.sleep(0.2)
    answer = asyncio.ensure_future(engine.host.snapshot())
    await asyncio.sleep(0)
    assert engine.host.pid is not None
    os.kill(engine.host.pid, signal.SIGKILL)
    with pytest.raises(PageddError, match=r"^engine_died"):
        await answer


@pytest.mark.parametrize("how", ["step", "stopped"])
async def test_an_engine_that_hangs_stalls_and_is_replaced(start_host: StartHost, how: str) -> None:
    engine = await start_host(silence=SilenceLimits(stalled_s=2, hung_s=3))
    first = engine.host.pid
    assert first is not None
    if how == "step":
        engine.host.submit(request("a", Prompt.HANG))
    else:
        os.kill(first, signal.SIGSTOP)
    await until(lambda: engine.host.state is EngineState.STALLED)
    with pytest.raises(PageddError, match=r"^engine_stalled: no step has ended for over 2 s; try again shortly"):
        engine.host.submit(request("b", 5))
    await until(lambda: engine.host.state is EngineState.READY and engine.host.pid != first)
    assert engine.lost == [f"the engine process (pid {first}) hung: no step ended within 3 s"]
    assert not psutil.pid_exists(first)
    if how == "step":
        assert re.search(r"fake_engine\.py.* in step", engine.host.trace)
    engine.host.submit(request("c", 5))
    await until(lambda: engine.tokens_of("c") == [6, 7, 8])


async def test_an_engine_that_only_stalls_goes_on_and_loses_nothing(start_host: StartHost) -> None:
    engine = await start_host(silence=SilenceLimits(stalled_s=2, hung_s=60))
    pid = engine.host.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: engine.host.state is EngineState.STALLED)
    os.kill(pid, signal.SIGCONT)
    await until(lambda: engine.host.state is EngineState.READY)
    assert engine.host.pid == pid
    assert engine.lost == []


async def test_an_idle_engine_is_alive_for_as_long_as_it_is_idle(start_host: StartHost) -> None:
    engine = await start_host(silence=SilenceLimits(stalled_s=1.8, hung_s=2))
    await asyncio.sleep(3.5)
    assert engine.states == [EngineState.STARTING, EngineState.LOADING, EngineState.READY]


async def test_an_engine_that_cannot_be_ended_is_a_failure(
    start_host: StartHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagedd.daemon.engine_child._KILL_TIMEOUT_S", 0.1)
    engine = await start_host(silence=SilenceLimits(stalled_s=1.5, hung_s=2))
    # As while a driver holds it in the kernel.
    monkeypatch.setattr(EngineChild, "kill", lambda child: None)
    pid = engine.host.pid
    engine.host.submit(request("a", Prompt.HANG))
    await until(lambda: engine.host.state is EngineState.FAILED)
    assert engine.host.failure is not None
    assert str(engine.host.failure) == f"engine_failed: the hung engine process (pid {pid}) cannot be ended"
    assert len(engine.lost) == 1
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


async def test_a_hung_engine_is_killed_when_the_host_stops(
    start_host: StartHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagedd.daemon.engine_lives._EXIT_TIMEOUT_S", 0.1)
    engine = await start_host()
    pid = engine.host.pid
    engine.host.submit(request("a", Prompt.HANG))
    await asyncio.sleep(0.05)
    await engine.host.stop()
    assert pid is not None
    assert not psutil.pid_exists(pid)
    assert len(engine.lost) == 1


async def test_a_host_stops_although_its_engine_cannot_be_ended(
    start_host: StartHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagedd.daemon.engine_lives._EXIT_TIMEOUT_S", 0.1)
    monkeypatch.setattr("pagedd.daemon.engine_child._KILL_TIMEOUT_S", 0.1)
    engine = await start_host()
    monkeypatch.setattr(EngineChild, "kill", lambda child: None)
    pid = engine.host.pid
    engine.host.submit(request("a", Prompt.HANG))
    await asyncio.sleep(0.05)
    async with asyncio.timeout(60):
        await engine.host.stop()
    assert engine.host.state is EngineState.STOPPED
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


async def test_a_listener_that_breaks_does_not_keep_the_next_engine_from_starting(start_host: StartHost) -> None:
    engine = await start_host()

    def break_down(reason: str) -> None:
        raise ZeroDivisionError

    engine.host.on_lost = break_down
    engine.host.submit(request("a", Prompt.CRASH))
    await until(lambda: engine.host.num_restarts == 1 and engine.host.state is EngineState.READY)
