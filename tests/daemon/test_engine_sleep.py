"""An engine that sleeps: it has no process, however its end went, until it is woken."""

import asyncio
import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from pagedd.client.errors import PageddError
from pagedd.daemon.engine_child import EngineChild
from pagedd.daemon.engine_state import EngineState

from .fake_engine import Prompt
from .recorded_host import StartHost, request
from .waiting import until


async def test_an_engine_that_sleeps_has_no_process_until_it_is_woken(start_host: StartHost) -> None:
    engine = await start_host()
    pid = engine.host.pid
    slept: list[bool] = []
    engine.host.on_ended = lambda: slept.append(True)
    engine.host.begin_sleep()
    await engine.host.sleep()
    assert pid is not None
    assert not psutil.pid_exists(pid)
    assert engine.host.state is EngineState.ASLEEP
    assert (slept, engine.lost, engine.host.num_restarts) == ([True], [], 0)
    with pytest.raises(PageddError, match=r"^engine_asleep"):
        engine.host.submit(request("a", 5))
    engine.host.wake()
    await until(lambda: engine.host.state is EngineState.READY)
    assert not engine.host.is_sleeping
    engine.host.submit(request("b", 5))
    await until(lambda: engine.tokens_of("b") == [6, 7, 8])


async def test_the_caches_quality_is_measured_by_the_first_engine_and_known_to_those_after_it(
    start_host: StartHost,
) -> None:
    engine = await start_host("checks")
    first_pid = engine.host.pid
    engine.host.begin_sleep()
    await engine.host.sleep()
    engine.host.wake()
    await until(lambda: engine.host.state is EngineState.READY)
    assert engine.host.pid != first_pid
    assert engine.host.info is not None
    assert engine.host.info.kv_quality is not None
    assert engine.host.info.kv_quality.num_tokens == first_pid


async def test_a_host_stops_while_its_engine_sleeps(start_host: StartHost) -> None:
    engine = await start_host()
    engine.host.begin_sleep()
    await engine.host.sleep()
    await engine.host.stop()
    assert engine.host.state is EngineState.STOPPED
    assert engine.host.pid is None


async def test_an_engine_that_hangs_is_put_to_sleep_all_the_same_and_is_lost(
    start_host: StartHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagedd.daemon.engine_lives._EXIT_TIMEOUT_S", 0.1)
    engine = await start_host()
    pid = engine.host.pid
    ended: list[bool] = []
    engine.host.on_ended = lambda: ended.append(True)
    engine.host.submit(request("a", Prompt.HANG))
    await asyncio.sleep(0.05)
    engine.host.begin_sleep()
    await engine.host.sleep()
    assert engine.host.state is EngineState.ASLEEP
    assert engine.lost == [f"the engine process (pid {pid}) hung: it did not end within 0.1 s of being told to"]
    assert ended == []
    assert re.search(r"fake_engine\.py.* in step", engine.host.trace)


@pytest.mark.parametrize("deadly", [Prompt.CRASH, Prompt.VANISH])
async def test_an_engine_that_dies_before_it_sleeps_is_lost_and_no_other_starts_until_it_is_woken(
    start_host: StartHost, deadly: int
) -> None:
    engine = await start_host()
    ended: list[bool] = []
    engine.host.on_ended = lambda: ended.append(True)
    engine.host.begin_sleep()
    pid = engine.host.pid
    engine.host.submit(request("a", deadly))
    await until(lambda: engine.host.state is EngineState.ASLEEP)
    await engine.host.sleep()
    assert (len(engine.lost), ended, engine.host.num_restarts) == (1, [], 1)
    assert f"(pid {pid}) ended with status" in engine.host.detail
    engine.host.wake()
    await until(lambda: engine.host.state is EngineState.READY)
    engine.host.submit(request("b", 5))
    await until(lambda: engine.tokens_of("b") == [6, 7, 8])


@pytest.mark.parametrize("how", ["sleep", "stop"])
async def test_an_engine_that_dies_of_its_exit_is_lost(start_host: StartHost, how: str) -> None:
    engine = await start_host("ok-until-exit")
    if how == "sleep":
        engine.host.begin_sleep()
        await engine.host.sleep()
    else:
        await engine.host.stop()
    assert len(engine.lost) == 1
    assert "ended with status 70" in engine.lost[0]


async def test_putting_an_engine_to_sleep_that_cannot_be_ended_fails(
    start_host: StartHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagedd.daemon.engine_lives._EXIT_TIMEOUT_S", 0.1)
    monkeypatch.setattr("pagedd.daemon.engine_child._KILL_TIMEOUT_S", 0.1)
    engine = await start_host()
    monkeypatch.setattr(EngineChild, "kill", lambda child: None)
    pid = engine.host.pid
    engine.host.submit(request("a", Prompt.HANG))
    await asyncio.sleep(0.05)
    engine.host.begin_sleep()
    async with asyncio.timeout(60):
        with pytest.raises(PageddError, match=r"^engine_failed: .* cannot be ended"):
            await engine.host.sleep()
    assert not engine.host.is_sleeping
    assert len(engine.lost) == 1
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


async def test_a_device_that_is_away_when_a_sleeper_is_woken_is_waited_for_however_long(
    start_host: StartHost, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("pagedd.daemon.restart_policy._FIRST_DELAY_S", 0.01)
    monkeypatch.setattr("pagedd.daemon.restart_policy._MAX_DELAY_S", 0.01)
    monkeypatch.setattr("pagedd.daemon.restart_policy.DEVICE_PATIENCE_S", 0.02)
    absence = tmp_path / "absent"
    engine = await start_host(f"away-while:{absence}")
    engine.host.begin_sleep()
    await engine.host.sleep()
    absence.touch()
    engine.host.wake()
    await until(lambda: engine.host.num_restarts >= 3 or engine.host.state is EngineState.FAILED)
    absence.unlink()
    await until(lambda: engine.host.state in (EngineState.READY, EngineState.FAILED))
    assert engine.host.state is EngineState.READY
