"""Loads of an engine: what is said meanwhile, and which are tried again, waited for or given up."""

import asyncio
from pathlib import Path

import psutil
import pytest

from pagedd.client.errors import PageddError
from pagedd.daemon.engine_host import EngineHost
from pagedd.daemon.engine_state import EngineState
from pagedd.daemon.engine_watch import SilenceLimits
from pagedd.daemon.restart_policy import RestartPolicy

from .fake_engine import Prompt
from .recorded_host import FAKE_ENGINE, StartHost, request
from .waiting import until


async def test_a_request_while_loading_is_refused_with_the_progress(start_host: StartHost) -> None:
    engine = await start_host("slow", wait=False)
    await until(lambda: engine.host.progress >= 0.43)
    with pytest.raises(PageddError, match=r"^engine_loading: loading, (43|86) % \(weights\)"):
        engine.host.submit(request("a", 5))


async def test_stopping_while_the_engine_loads_takes_no_time(start_host: StartHost) -> None:
    engine = await start_host("slow", wait=False)
    await until(lambda: engine.host.state is EngineState.LOADING)
    pid = engine.host.pid
    assert pid is not None
    async with asyncio.timeout(60):
        await engine.host.stop()
    assert not psutil.pid_exists(pid)
    assert engine.host.state is EngineState.STOPPED


async def test_a_load_that_hangs_is_tried_again_and_given_up(
    start_host: StartHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagedd.daemon.restart_policy._FIRST_DELAY_S", 0.01)
    engine = await start_host("slow", wait=False, silence=SilenceLimits(load_s=1))
    await until(lambda: engine.host.state is EngineState.FAILED)
    assert engine.host.num_restarts == 2
    assert "hung: its load did not get on for 1 s (weights)" in engine.host.detail


async def test_a_fault_of_the_settings_is_not_tried_again(start_host: StartHost) -> None:
    engine = await start_host("error:unsupported_model", wait=False)
    await until(lambda: engine.host.state is EngineState.FAILED)
    assert engine.host.failure is not None
    assert engine.host.failure.code == "unsupported_model"
    assert engine.host.num_restarts == 0
    with pytest.raises(PageddError, match=r"^engine_failed: unsupported_model: scripted"):
        engine.host.submit(request("a", 5))


@pytest.mark.parametrize("model", ["vanish", "fault", "error:engine_died"])
async def test_an_engine_that_never_loads_is_given_up_after_three_tries(
    start_host: StartHost, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.setattr("pagedd.daemon.restart_policy._FIRST_DELAY_S", 0.01)
    engine = await start_host(model, wait=False)
    await until(lambda: engine.host.state is EngineState.FAILED)
    assert engine.host.num_restarts == 2
    assert engine.lost == []


async def test_where_the_device_stays_away_the_cpu_serves_and_it_is_said(
    start_host: StartHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pagedd.daemon.restart_policy._FIRST_DELAY_S", 0.01)
    monkeypatch.setattr("pagedd.daemon.restart_policy.DEVICE_PATIENCE_S", 0.02)
    engine = await start_host("away", policy=RestartPolicy(can_fall_back=True))
    assert engine.host.has_fallen_back
    (said,) = [record for record in caplog.records if "the CPU serves in its place until" in record.getMessage()]
    assert said.levelname == "WARNING"
    assert "starting another" not in said.getMessage()
    engine.host.submit(request("a", 5))
    await until(lambda: engine.tokens_of("a") == [6, 7, 8])


async def test_a_device_that_is_late_and_later_lost_is_waited_for_each_time(
    start_host: StartHost, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("pagedd.daemon.restart_policy._FIRST_DELAY_S", 0.01)
    monkeypatch.setattr("pagedd.daemon.restart_policy._MAX_DELAY_S", 0.01)
    absence = tmp_path / "absent"
    absence.touch()
    engine = await start_host(f"away-while:{absence}", wait=False)
    await until(lambda: engine.host.num_restarts >= 2)
    with pytest.raises(PageddError, match=r"^engine_(died|loading)"):
        engine.host.submit(request("early", 5))
    absence.unlink()
    await until(lambda: engine.host.state is EngineState.READY)

    absence.touch()  # as after a suspend: every call fails, and so does every load
    engine.host.submit(request("a", Prompt.LOSE_DEVICE))
    before = engine.host.num_restarts
    await until(lambda: engine.host.num_restarts >= before + 2)
    absence.unlink()
    await until(lambda: engine.host.state is EngineState.READY)
    assert len(engine.lost) == 1, "what ran is told once, however many loads failed after it"
    assert not engine.host.has_fallen_back
    engine.host.submit(request("b", 5))
    await until(lambda: engine.tokens_of("b") == [6, 7, 8])


async def test_a_load_that_fails_once_is_tried_again(start_host: StartHost, tmp_path: Path) -> None:
    engine = await start_host(f"vanish-once:{tmp_path / 'tried'}")
    assert engine.host.num_restarts == 1
    assert engine.lost == []


async def test_a_program_that_cannot_be_started_is_a_failure_with_its_reason(
    start_host: StartHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagedd.daemon.restart_policy._FIRST_DELAY_S", 0.01)
    engine = await start_host(wait=False, command=("/nonexistent",))
    await until(lambda: engine.host.state is EngineState.FAILED)
    assert "could not be started" in engine.host.detail


async def test_a_socket_that_cannot_be_bound_is_a_failure_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagedd.daemon.restart_policy._FIRST_DELAY_S", 0.01)
    host = EngineHost(tmp_path / "nowhere" / "engine.sock", FAKE_ENGINE)
    await host.start()
    await until(lambda: host.state is EngineState.FAILED)
    assert "could not be started" in host.detail
    await host.stop()
