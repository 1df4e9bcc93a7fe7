"""A daemon of this checkout, started for a benchmark and stopped after it."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp


@dataclass(frozen=True, slots=True)
class RunningDaemon:
    """Seconds count from the start of the process."""

    http_socket: Path
    pid: int
    health_s: float
    ready_s: float


@contextlib.asynccontextmanager
async def running_daemon(
    flags: list[str],
    *,
    timeout_s: float = 300.0,
    under: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> AsyncIterator[RunningDaemon]:
    """Runs `pagedd FLAGS` in a runtime directory of its own until the block ends.

    `under` is a command that runs it; `environ` is added to this process's own.

    Raises `RuntimeError` with the daemon's log when it ends or is not ready in time.
    """
    with tempfile.TemporaryDirectory(prefix="pagedd-bench-") as directory:
        log = Path(directory) / "log"
        started = time.perf_counter()
        with log.open("wb") as log_file:
            process = subprocess.Popen(  # noqa: ASYNC220 (returns at once)
                [*under, sys.executable, "-P", "-m", "pagedd.daemon.cli", "--runtime-dir", directory, *flags],
                stdout=log_file,
                stderr=subprocess.STDOUT,
                env=os.environ | dict(environ or {}),
            )
        http_socket = Path(directory) / "http.sock"

        async def until(path: str) -> float:
            while not await _is_ok(http_socket, path):
                waited_s = time.perf_counter() - started
                if process.poll() is not None or waited_s > timeout_s:
                    raise RuntimeError(f"no answer from {path} after {waited_s:.1f} s; the log:\n{log.read_text()}")
                await asyncio.sleep(0.02)
            return time.perf_counter() - started

        try:
            health_s = await until("/health")
            ready_s = await until("/ready")
            yield RunningDaemon(http_socket, process.pid, health_s, ready_s)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                await asyncio.to_thread(process.wait, 30)
            except subprocess.TimeoutExpired:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()


def free_port() -> int:
    """A TCP port on loopback that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


async def _is_ok(http_socket: Path, path: str) -> bool:
    try:
        async with (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(http_socket))) as session,
            session.get(f"http://localhost{path}") as response,
        ):
            return response.status == 200
    except (aiohttp.ClientError, OSError):
        return False
