"""Suspend and resume over a real bus of its own, on which a test plays logind."""

import asyncio
import logging
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pagedd.daemon.logind import Logind

from .waiting import until

dbus_fast = pytest.importorskip("dbus_fast")
needs_a_bus = pytest.mark.skipif(shutil.which("dbus-daemon") is None, reason="there is no dbus-daemon")
CONFIG = """<busconfig><type>session</type><listen>unix:path={path}</listen><auth>EXTERNAL</auth>
<policy context="default">
<allow send_destination="*" eavesdrop="true"/><allow eavesdrop="true"/><allow own="*"/>
</policy></busconfig>"""


class FakeLogind:
    """Holds the reading end of the pipe whose other end is the lock: it is let go of when that end is closed."""

    def __init__(self, bus: Any) -> None:
        self.bus = bus
        self.inhibited: list[list[str]] = []
        self.locks: list[int] = []
        self.sent: list[int] = []
        bus.add_message_handler(self.answer)

    def answer(self, message: Any) -> Any:
        if message.member == "Inhibit":
            self.inhibited.append(message.body)
            reading, writing = os.pipe()
            os.set_blocking(reading, False)
            self.locks.append(reading)
            self.sent.append(writing)
            return dbus_fast.Message.new_method_return(message, "h", [0], [writing])
        if message.member == "Get" and message.body[1] == "InhibitDelayMaxUSec":
            return dbus_fast.Message.new_method_return(message, "v", [dbus_fast.Variant("t", 3_000_000)])
        return None

    def is_held(self) -> bool:
        """Whether somebody has the newest lock; the end that was sent is closed here first."""
        while self.sent:
            os.close(self.sent.pop())
        try:
            return os.read(self.locks[-1], 1) != b""
        except BlockingIOError:
            return True

    async def prepare_for_sleep(self, begins: bool) -> None:
        signal = dbus_fast.Message.new_signal(
            "/org/freedesktop/login1", "org.freedesktop.login1.Manager", "PrepareForSleep", "b", [begins]
        )
        await self.bus.send(signal)


@pytest.fixture
async def logind(socket_folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeLogind]:
    from dbus_fast.aio import MessageBus

    path, config = socket_folder / "bus", socket_folder / "bus.conf"
    config.write_text(CONFIG.format(path=path))
    process = await asyncio.create_subprocess_exec("dbus-daemon", f"--config-file={config}", "--nofork")
    await until(path.exists)
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", f"unix:path={path}")
    bus = await MessageBus(bus_address=f"unix:path={path}", negotiate_unix_fd=True).connect()
    await bus.request_name("org.freedesktop.login1")
    yield FakeLogind(bus)
    bus.disconnect()
    process.kill()
    await process.wait()


@needs_a_bus
async def test_a_suspend_waits_until_what_is_to_be_done_is_done_and_the_next_one_too(logind: FakeLogind) -> None:
    limits: list[float] = []
    may_end, resumed = asyncio.Event(), asyncio.Event()

    async def on_suspend(within_s: float) -> None:
        limits.append(within_s)
        await may_end.wait()

    async def on_resume() -> None:
        resumed.set()

    watcher = Logind(on_suspend, on_resume)
    watching = asyncio.create_task(watcher.watch())
    await until(lambda: watcher.is_ready)
    assert logind.inhibited == [["sleep", "pagedd", "requests end and the GPU is left", "delay"]]
    await logind.prepare_for_sleep(True)
    await until(lambda: bool(limits))
    assert limits == [2.0], "a second less than logind waits"
    assert logind.is_held()
    may_end.set()
    await until(lambda: not logind.is_held())
    await logind.prepare_for_sleep(False)
    await asyncio.wait_for(resumed.wait(), 10)
    assert len(logind.locks) == 2
    assert logind.is_held()
    watching.cancel()
    await asyncio.wait({watching})
    assert not logind.is_held()


@needs_a_bus
async def test_a_fault_in_what_is_done_does_not_keep_the_machine_awake(logind: FakeLogind) -> None:
    async def on_suspend(within_s: float) -> None:
        raise RuntimeError("scripted fault")

    async def on_resume() -> None:
        pass

    watcher = Logind(on_suspend, on_resume)
    watching = asyncio.create_task(watcher.watch())
    await until(lambda: watcher.is_ready)
    await logind.prepare_for_sleep(True)
    await until(lambda: not logind.is_held())
    watching.cancel()
    await asyncio.wait({watching})


async def test_without_a_bus_nothing_happens_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", f"unix:path={tmp_path / 'none'}")
    caplog.set_level(logging.DEBUG, logger="pagedd.daemon.logind")

    async def never(*_: float) -> None:
        raise AssertionError

    await Logind(never, never).watch()
    [record] = [record for record in caplog.records if record.name == "pagedd.daemon.logind"]
    assert record.levelno == logging.DEBUG
