"""One engine process and its end."""

import asyncio
import logging
from pathlib import Path

import pytest

from pagedd.daemon import engine_child
from pagedd.daemon.config import DaemonConfig
from pagedd.daemon.engine_child import EngineChild
from pagedd.daemon.engine_watch import SilenceLimits

from .waiting import until


async def test_a_process_that_is_killed_is_no_hung_one_however_late_the_kernel_says_so(
    socket_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_child, "TICK_S", 0.005)
    child = EngineChild(
        ["sh", "-c", "sleep 60"], socket_folder / "engine.sock", SilenceLimits.of(DaemonConfig()),
        on_message=lambda message: None, on_stalled=lambda: None,
    )  # fmt: skip
    life = asyncio.create_task(child.run([]))
    await until(lambda: child.pid is not None)
    kill = child.kill
    monkeypatch.setattr(child, "kill", lambda: asyncio.get_running_loop().call_later(0.1, kill))
    with caplog.at_level(logging.WARNING):
        child.end_at_once()
        ended = await life
    assert "was ended by SIGKILL" in ended.reason
    assert caplog.messages == []
