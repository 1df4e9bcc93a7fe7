"""Real daemons for tests: a process of its own, over a temporary runtime directory, with a clean environment.

start_daemon     starts one; all that a test starts are ended after it
serving_daemon   one with the real model and engine, ready, shared by all tests of the run: leave it as you found it

start_host       starts an engine's host over the process of a scripted engine; all are stopped after the test

And, without a process: `served`, both APIs over a scripted host, and a `door` to the HTTP one; or `service`, over a
scripted `host` that answers what a test says, with an `other` model for it.
"""

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path

import pytest

from pagedd.client.endpoints import Endpoints
from pagedd.daemon.config import DaemonConfig
from pagedd.daemon.engine_host import EngineHost
from pagedd.daemon.engine_state import EngineState
from pagedd.daemon.engine_watch import SilenceLimits
from pagedd.daemon.restart_policy import RestartPolicy
from pagedd.daemon.served_model import ServedModel
from pagedd.daemon.service import Service
from pagedd.engine.config import EngineConfig

from .byte_model import write_model
from .http_door import KEYS, Door
from .other_model import OtherModel
from .recorded_host import FAKE_ENGINE, Recorder, StartHost
from .scripted_host import ScriptedHost
from .served import Served, serving
from .waiting import until

START_TIMEOUT_S = 120
FAKE_DAEMON = (sys.executable, "-P", str(Path(__file__).with_name("fake_daemon.py")))
DAEMON = (sys.executable, "-P", "-m", "pagedd.daemon.cli")


@dataclass
class RunningDaemon:
    """A daemon process; `log` is what it wrote to standard output and error."""

    process: "subprocess.Popen[bytes]"
    endpoints: Endpoints
    log_file: Path
    manager: socket.socket = field(repr=False)
    _heard: list[str] = field(default_factory=list, repr=False)

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of a GET over the HTTP socket. Raises `OSError` when nobody listens."""
        return self.request("GET", path)

    def request(self, method: str, path: str, body: str | None = None) -> tuple[int, str]:
        connection = _UnixConnection(self.endpoints.http)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def wait_until(self, condition: Callable[["RunningDaemon"], bool]) -> None:
        """Fails the test when the daemon ends first, or takes longer than `START_TIMEOUT_S`."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            with suppress(OSError):
                if condition(self):
                    return
            assert self.process.poll() is None, f"the daemon ended with {self.process.returncode}:\n{self.log}"
            assert time.monotonic() < deadline, f"the daemon took too long:\n{self.log}"
            time.sleep(0.02)

    def wait_ready(self) -> "RunningDaemon":
        self.wait_until(lambda daemon: daemon.get("/ready")[0] == 200)
        return self

    def notified(self) -> list[str]:
        """What the service manager has heard so far, one assignment an item."""
        with suppress(BlockingIOError):
            while True:
                self._heard += self.manager.recv(4096, socket.MSG_DONTWAIT).decode().split("\n")
        return self._heard

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 30) -> int:
        """Sends the signal and returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout_s)


class _UnixConnection(HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=30)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


StartDaemon = Callable[..., RunningDaemon]


class DaemonFactory:
    """Starts daemons in `folder`, and ends them. A cache shared by all keeps the model prepared once."""

    def __init__(self, folder: Path, cache: Path, model: Path | None) -> None:
        self._folder = folder
        self._cache = cache
        self._model = model
        self._running: list[RunningDaemon] = []

    def start(
        self, *flags: str, fake_engine: bool = False, environ: dict[str, str] | None = None, run: str = "run"
    ) -> RunningDaemon:
        """`fake_engine` takes the scripted engine. Daemons with the same `run` have the same runtime directory."""
        endpoints = Endpoints(self._folder / run)
        manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        notify = self._folder / f"notify{len(self._running)}"
        manager.bind(str(notify))
        inherited = {name: text for name, text in os.environ.items() if not name.startswith("PAGEDD_")}
        environment = inherited | {
            "XDG_CACHE_HOME": str(self._cache),
            "XDG_STATE_HOME": str(self._folder / "state"),
            "NOTIFY_SOCKET": str(notify),
            "OMP_NUM_THREADS": "1",
            "PAGEDD_KV_QUALITY_CHECK": "off",  # takes seconds, and one daemon does it for all
        }
        model = ("--model", str(self._model)) if self._model is not None else ()
        log_file = self._folder / f"log{len(self._running)}"
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                [*(FAKE_DAEMON if fake_engine else DAEMON), "--runtime-dir", str(endpoints.directory), *model, *flags],
                env=environment | (environ or {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        daemon = RunningDaemon(process, endpoints, log_file, manager)
        self._running.append(daemon)
        return daemon

    def close(self) -> None:
        for daemon in self._running:
            if daemon.process.poll() is None:
                daemon.process.kill()
                daemon.process.wait()
            daemon.manager.close()


@pytest.fixture(autouse=True)
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where what outlives a daemon goes, instead of to this user's own."""
    folder = tmp_path / "state"
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    return folder


@pytest.fixture(autouse=True)
def no_fault_is_lost(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fails a test in which a task or a callback raised what nobody asked for."""
    yield
    lost = [record for record in caplog.get_records("call") if (record.name, record.levelname) == ("asyncio", "ERROR")]
    assert lost == [], "\n".join(logging.Formatter().format(record) for record in lost)


@pytest.fixture(scope="session")
def daemon_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of their own, but for the C++ kernels: tests of the engine have built those, which takes its time."""
    cache = tmp_path_factory.mktemp("cache")
    kernels = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagedd" / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    (cache / "pagedd").mkdir()
    (cache / "pagedd" / "kernels").symlink_to(kernels)
    return cache


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    """A folder with a path short enough for sockets; pytest's own may be too long."""
    folder = Path(tempfile.mkdtemp(prefix="pagedd-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def free_port() -> int:
    """A TCP port on loopback that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@pytest.fixture
def start_daemon(socket_folder: Path, daemon_cache: Path, model_gguf: Path) -> Iterator[StartDaemon]:
    """`start_daemon(*flags, fake_engine=False, environ=None, run="run") -> RunningDaemon`, with the real model."""
    factory = DaemonFactory(socket_folder, daemon_cache, model_gguf)
    yield factory.start
    factory.close()


@pytest.fixture(scope="session")
def serving_daemon(daemon_cache: Path, model_gguf: Path) -> Iterator[RunningDaemon]:
    """A ready daemon with the real model and a pool of 256 blocks of 16 tokens."""
    folder = Path(tempfile.mkdtemp(prefix="pagedd-"))
    factory = DaemonFactory(folder, daemon_cache, model_gguf)
    yield factory.start("--num-blocks", "256", "--kv-quality-check", "warn").wait_ready()
    factory.close()
    shutil.rmtree(folder)


@pytest.fixture
async def start_host(tmp_path: Path) -> AsyncIterator[StartHost]:
    """Starts a host over the scripted engine; `model` scripts its loading. All are stopped after the test."""
    hosts: list[EngineHost] = []

    async def start(
        model: str = "ok",
        *,
        wait: bool = True,
        command: tuple[str, ...] = FAKE_ENGINE,
        policy: RestartPolicy | None = None,
        silence: SilenceLimits | None = None,
    ) -> Recorder:
        host = EngineHost(tmp_path / "engine.sock", command, policy, silence)
        hosts.append(host)
        recorder = Recorder(host)
        await host.start()
        host.load(EngineConfig(model=model))
        if wait:
            await until(lambda: host.state is EngineState.READY)
        return recorder

    yield start
    for host in hosts:
        await host.stop()


@pytest.fixture
def host() -> ScriptedHost:
    return ScriptedHost(reply=lambda request: None)


@pytest.fixture
async def service(host: ScriptedHost, tmp_path: Path) -> AsyncIterator[Service]:
    service = Service(DaemonConfig(drain_seconds=30), host)
    service.set_model(write_model(tmp_path))
    yield service
    await service.close()


@pytest.fixture
async def served(socket_folder: Path) -> AsyncIterator[Served]:
    """Both APIs over a scripted host of their own."""
    async with serving(socket_folder) as running:
        yield running


@pytest.fixture(params=["unix", "tcp"])
async def door(request: pytest.FixtureRequest, socket_folder: Path, free_port: int) -> AsyncIterator[Door]:
    """Either way to the HTTP API of a scripted host."""
    keys = socket_folder / "keys"
    keys.write_text(KEYS)
    async with serving(socket_folder, http_port=free_port, api_key_file=keys) as running:
        yield Door(running, free_port if request.param == "tcp" else None)


@pytest.fixture
async def other(service: Service, tmp_path: Path) -> OtherModel:
    return OtherModel(tmp_path, service)


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of models that were closed, in order."""
    names: list[str] = []
    close = ServedModel.close

    def note_and_close(model: ServedModel) -> None:
        names.append(model.name)
        close(model)

    monkeypatch.setattr(ServedModel, "close", note_and_close)
    return names
