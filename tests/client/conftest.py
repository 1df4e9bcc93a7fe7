"""A daemon that only speaks, and `pagectl` before it: called in this process, or started as one of its own."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pagedd.client import pagectl
from pagedd.client.stats_frame import StatsFrame

from .fake_daemon import WAIT_S, FakeDaemon, make_frame
from .pagectl_calls import Run, Start


@pytest.fixture(name="make_frame")
def make_frame_fixture() -> Callable[..., StatsFrame]:
    return make_frame


@pytest.fixture
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short: a Unix socket's path has 107 bytes, and pytest names folders after tests."""
    return tmp_path_factory.mktemp("d")


@pytest.fixture
def daemon(directory: Path) -> Iterator[FakeDaemon]:
    fake = FakeDaemon(directory)
    yield fake
    fake.stop()


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    """Waits until something is so; fails after a minute."""

    def wait(is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not is_so():
            assert time.monotonic() < deadline, "it never came to be so"
            time.sleep(0.005)

    return wait


@pytest.fixture
def run(directory: Path) -> Run:
    """Runs the command in this process; the exit status."""
    return lambda *arguments: pagectl.main(["--runtime-dir", str(directory), *arguments])


@pytest.fixture
def start(directory: Path) -> Iterator[Start]:
    """Starts the command as a process."""
    started: list[subprocess.Popen[bytes]] = []

    def popen(*arguments: str, environ: dict[str, str] | None = None, **kwargs: Any) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "pagedd.client.pagectl", "--runtime-dir", str(directory), *arguments]
        process = subprocess.Popen(command, env={**os.environ, **(environ or {})}, **kwargs)
        started.append(process)
        return process

    yield popen
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            with contextlib.suppress(BrokenPipeError):
                if stream:
                    stream.close()
