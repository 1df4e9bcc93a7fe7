"""`Replica`: one pagedd as a child process, and the way of a request to it and of its answer back.

Owns the child's life, which ends with this process, however that ends. Knows nothing of Ray, nor what is in a body.
"""

import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import aiohttp

from pagedd.client import AsyncClient, PageddError
from pagedd.client.endpoints import Endpoints
from pagedd.client.sync import Client
from pagedd.scale.ask import Ask, Head

_DAEMON = (sys.executable, "-P", "-m", "pagedd.daemon.cli")
_STOP_S = 30.0
_POLL_S = 0.1
# A daemon that says nothing for so long is not well, whatever its engine does.
_PING_TIMEOUT_S = 10.0


class Replica:
    """A daemon of this process's own. Ready when made.

    Args:
        flags: the daemon's, as `pagedd --help` has them; its sockets' folder is given.
        daemon: the command that is the daemon.

    Raises:
        RuntimeError: it ended before it was ready; what it said is in the message.
    """

    def __init__(self, flags: Sequence[str] = (), daemon: Sequence[str] = _DAEMON) -> None:
        # Short, because a socket's path may have 107 bytes.
        self._folder = Path(tempfile.mkdtemp(prefix="pagedd-"))
        self._endpoints = Endpoints(self._folder)
        self._log = self._folder / "log"
        self._process: subprocess.Popen[bytes] | None = None
        self._has_started = threading.Event()
        self._is_serving = False
        command = [*daemon, "--runtime-dir", str(self._folder), *flags]
        # The kernel signals a child when the thread that made it ends, so that one lives as long as the child.
        threading.Thread(target=self._keep, args=(command,), name="pagedd", daemon=True).start()
        self._has_started.wait()
        try:
            self._wait_ready()
            self._is_serving = True
        except BaseException:
            self.close()
            raise

    @property
    def name(self) -> str:
        """The machine and the daemon's process number."""
        return f"{socket.gethostname()}/{self._running().pid}"

    async def relay(self, ask: Ask) -> AsyncIterator[Head | bytes]:
        """The daemon's answer: its head, then its bytes as they come. Whoever stops listening ends the request."""
        if not ask.is_relayed:
            raise PageddError("forbidden", f"{ask.method} {ask.path}: not a route of a replica")
        headers = {"Content-Type": "application/json"} if ask.body else {}
        url = f"http://localhost{ask.path}"
        # One connection a request, so that none outlives it. An answer may take as long as it takes.
        connector, unlimited = aiohttp.UnixConnector(str(self._endpoints.http)), aiohttp.ClientTimeout(total=None)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=unlimited) as session,
            session.request(ask.method, url, data=ask.body, headers=headers) as answer,
        ):
            content_type = answer.headers.get("Content-Type", "application/json")
            yield Head(answer.status, content_type, answer.headers.get("Retry-After"), self.name)
            async for piece in answer.content.iter_any():
                yield piece

    async def check_health(self) -> None:
        """Raises `RuntimeError` or `PageddError` when the daemon is gone or says nothing; Ray then starts another.

        An engine that died or sleeps is the daemon's own business.
        """
        self._ensure_running()
        async with AsyncClient(self._folder, timeout_s=_PING_TIMEOUT_S) as client:
            await client.ping()

    def died(self) -> None:
        """Called, in a thread of its own, when the daemon ended by itself after it was ready."""

    def close(self) -> None:
        """Has the daemon drain and end; then nothing of it is left."""
        self._is_serving = False
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _keep(self, command: list[str]) -> None:
        try:
            with self._log.open("wb") as log:
                # SIGTERM to the daemon when this process is killed.
                tied = ["setpriv", "--pdeathsig", "TERM", "--", *command]
                self._process = subprocess.Popen(tied, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        finally:
            self._has_started.set()
        self._process.wait()
        if self._is_serving:
            self.died()

    def _wait_ready(self) -> None:
        while True:
            self._ensure_running()
            try:
                with Client(self._folder) as client:
                    if client.ping().state == "ready":
                        return
            except PageddError:
                pass  # no socket yet
            time.sleep(_POLL_S)

    def _ensure_running(self) -> None:
        status = self._running().poll()
        if status is not None:
            said = self._log.read_text(errors="replace").strip().splitlines()[-5:]
            raise RuntimeError(f"pagedd ended with status {status}: {' | '.join(said)}")

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._process is None:
            raise RuntimeError("setpriv cannot be started; install util-linux")
        return self._process
