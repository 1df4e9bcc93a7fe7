"""The look at device and model before a load: its child process ends with whoever asked."""

import asyncio
import sys

import psutil
import pytest

from pagedd.client.errors import PageddError
from pagedd.daemon import config_check
from pagedd.daemon.config import DaemonConfig

from .waiting import until


async def test_a_look_that_nobody_waits_for_any_more_ends_with_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_check, "_COMMAND", (sys.executable, "-c", "import time; time.sleep(600)"))
    before = set(psutil.Process().children())
    look = asyncio.create_task(config_check.check_startable(DaemonConfig(), print))
    await until(lambda: set(psutil.Process().children()) > before)
    [child] = set(psutil.Process().children()) - before
    look.cancel()
    with pytest.raises(asyncio.CancelledError):
        await look
    assert not child.is_running()


async def test_a_look_that_breaks_or_takes_too_long_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_check, "_COMMAND", (sys.executable, "-c", "raise SystemExit(3)"))
    with pytest.raises(PageddError, match="ended with status 3"):
        await config_check.check_startable(DaemonConfig(), print)
    monkeypatch.setattr(config_check, "_COMMAND", (sys.executable, "-c", "import time; time.sleep(600)"))
    monkeypatch.setattr(config_check, "_TIMEOUT_S", 0.01)
    with pytest.raises(PageddError, match="does the device answer"):
        await config_check.check_startable(DaemonConfig(), print)
