"""The life of the daemon: sockets first, then the model, then the engine; and all of it backwards at the end.

Owns the order, the signals and what systemd and the terminal are told. The parts: `runtime_dir.py`, `http_api.py`,
`zmq_api.py`, `service.py`, `model_process.py`, `engine_host.py`.
"""

import asyncio
import gc
import logging
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import uvloop

from pagedd.client.endpoints import Endpoints, client_endpoints, server_endpoints
from pagedd.client.errors import PageddError
from pagedd.daemon import fatal_trace, logs, systemd
from pagedd.daemon.activation import Inherited, inherited_sockets
from pagedd.daemon.advice_metrics import AdviceCollector
from pagedd.daemon.config import DaemonConfig
from pagedd.daemon.core_files import forbid_core_files
from pagedd.daemon.engine_host import EngineHost
from pagedd.daemon.engine_state import EngineState
from pagedd.daemon.engine_watch import SilenceLimits
from pagedd.daemon.gpus import cuda_index, load_nvml
from pagedd.daemon.http_api import HttpApi
from pagedd.daemon.http_connection import raise_descriptor_limit
from pagedd.daemon.logind import Logind
from pagedd.daemon.metering_metrics import MeteringCollector
from pagedd.daemon.model_loading import Candidate, find_model
from pagedd.daemon.models import find_weights
from pagedd.daemon.power import Power, Speed
from pagedd.daemon.reload import Reloader
from pagedd.daemon.restart_policy import RestartPolicy
from pagedd.daemon.rivals import Rivals
from pagedd.daemon.runtime_dir import RuntimeLock
from pagedd.daemon.service import Service
from pagedd.daemon.telemetry import Reading, Telemetry, TelemetryCollector
from pagedd.daemon.zmq_api import ZmqApi
from pagedd.engine.info import EngineInfo

log = logging.getLogger(__name__)

# While something loads, systemd is asked for this much more time, this often.
_EXTEND_S = 60
_TELL_INTERVAL_S = 10.0
# Counters are read so often that work and idle time can be told apart.
_METER_INTERVAL_S = 1.0
# How often to look who else wants the device.
_RIVALS_INTERVAL_S = 2.0
# How often to look at battery and heat.
_POWER_INTERVAL_S = 5.0
# Beyond the drain: closing sockets, and an engine in the middle of a long step.
_CLOSE_S = 10


def run(config: DaemonConfig, read_config: Callable[[], DaemonConfig]) -> None:
    """Serves until a signal. `read_config` reads the settings anew, for SIGHUP.

    Raises `PageddError` when the daemon cannot serve, now or any more.
    """
    logs.setup(config.log_level, config.log_format)
    fatal_trace.arm()
    forbid_core_files()
    raise_descriptor_limit()
    find_weights(config.model)  # a name that is none is refused before anything listens
    uvloop.run(serve(config, read_config))


async def serve(config: DaemonConfig, read_config: Callable[[], DaemonConfig]) -> None:
    """See `run`."""
    endpoints = server_endpoints(config.runtime_dir)
    inherited = inherited_sockets()
    lock = RuntimeLock(endpoints, inherited)
    try:
        await Daemon(config, read_config, endpoints, inherited).run()
    finally:
        lock.release()


class Daemon:
    """One run of the daemon over one runtime directory, which it must own."""

    def __init__(
        self, config: DaemonConfig, read_config: Callable[[], DaemonConfig], endpoints: Endpoints, inherited: Inherited
    ) -> None:
        self._config = config
        self._endpoints = endpoints
        policy = RestartPolicy(can_fall_back=config.device_fallback == "cpu")
        self._host = EngineHost(endpoints.engine, policy=policy, silence=SilenceLimits.of(config))
        self._service = Service(config, self._host)
        self._telemetry = Telemetry()
        self._service.read_machine = self._read_machine
        self._service.device.find_model = self._find_model
        registry = self._service.metrics.registry
        self._service.metrics.machine_registry.register(TelemetryCollector(lambda: self._read_machine().figures))
        registry.register(MeteringCollector(self._service.metering))
        registry.register(AdviceCollector(lambda: self._service.doctor.advice(self._host.info)))
        self._http = HttpApi(self._service, config, endpoints, inherited)
        self._apis: list[HttpApi | ZmqApi] = [self._http, ZmqApi(self._service, endpoints, inherited)]
        self._reloader = Reloader(
            config,
            read_config,
            {
                "quota": lambda new: self._service.metering.replace_quotas(new.quota),
                "log_level": self._set_log_level,
            },
        )
        self._had_terminal = has_terminal()
        self._stop_requested = asyncio.Event()
        self._was_ready = False
        self._greeted: EngineInfo | None = None  # of the last engine that was said to be ready

    async def run(self) -> None:
        """Returns after a signal and a drain. Raises `PageddError` when model or engine cannot be had."""
        self._listen_to_signals()
        watchdog = asyncio.create_task(_feed_watchdog())
        stop = asyncio.create_task(self._stop_requested.wait())
        life = asyncio.create_task(self._load_and_watch())
        try:
            await asyncio.wait({stop, life}, return_when=asyncio.FIRST_COMPLETED)
            if life.done():
                await life
        finally:
            stop.cancel()
            life.cancel()
            await asyncio.wait({life})
            await self._shut_down()
            watchdog.cancel()

    async def _load_and_watch(self) -> None:
        try:
            for api in self._apis:
                await api.start()
        except OSError as error:
            why = f"{self._endpoints.directory}: a socket cannot be opened: {error.strerror or error}"
            raise PageddError("invalid_setting", f"{why}; choose another runtime_dir", field="runtime_dir") from error
        log.info("listening in %s", self._endpoints.directory)
        if self._config.http_port is not None:
            with_tls = "" if self._config.tls_cert_file is None else " and TLS"
            log.info(
                "listening on %s, port %d, with API keys%s", self._config.http_host, self._config.http_port, with_tls
            )
        systemd.notify(f"STATUS={self._host.describe()}")

        tasks = [
            asyncio.create_task(work, name=name)
            for name, work in (
                ("the engine's life", self._load_and_announce()),
                ("telling systemd", self._tell_systemd_while_loading()),
                ("metering", self._meter()),
                ("sleep when idle", self._sleep_when_idle()),
                ("yielding to others", self._yield_to_rivals()),
                ("the pace", self._keep_pace()),
                ("logind", Logind(self._suspend, self._resume).watch()),
            )
        ]
        try:
            await wait_for_fault(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _load_and_announce(self) -> NoReturn:
        await self._host.start(log_level=self._config.log_level, log_format=self._config.log_format)
        # While the engine process imports its libraries.
        first = await find_model(
            self._config, self._config.model, self._config.served_model_name, self._report, check=False
        )
        self._service.serve(first.text_side)
        self._host.load(first.engine)
        while True:
            self._announce()
            await self._host.wait_changed()

    async def _find_model(self, name: str, served_name: str | None) -> Candidate:
        """Another model, while one is served."""
        return await find_model(self._config, name, served_name, log.info, check=True)

    def _report(self, line: str) -> None:
        log.info("%s", line)
        self._host.report(0.0, line)

    def _announce(self) -> None:
        """Tells systemd and the terminal about the engine's state. Raises `PageddError` when it has failed for good."""
        host = self._host
        if host.failure is not None:
            raise host.failure
        systemd.notify(f"STATUS={host.describe()}")
        if host.state is EngineState.READY and host.info is not self._greeted:
            self._greeted = host.info
            self._say_ready()
        if host.state is EngineState.READY and not self._was_ready:
            self._was_ready = True
            # What loading made is here to stay; collections need not walk it again.
            gc.freeze()
            systemd.notify("READY=1")
            if sys.stdout.isatty():
                print(how_to_talk(self._endpoints), flush=True)

    async def _tell_systemd_while_loading(self) -> None:
        """A load or a download may take minutes without a word, and systemd would give up."""
        while not self._was_ready:
            systemd.notify(f"EXTEND_TIMEOUT_USEC={_EXTEND_S * 1_000_000}", f"STATUS={self._host.describe()}")
            await asyncio.sleep(_TELL_INTERVAL_S)

    async def _sleep_when_idle(self) -> None:
        if (limit_s := self._config.idle_sleep_seconds) is None:
            return
        while True:
            await asyncio.sleep(min(_METER_INTERVAL_S, limit_s))
            await self._service.sleep_if_idle(limit_s)

    async def _yield_to_rivals(self) -> None:
        rivals = Rivals(self._config, load_nvml)
        while rivals.are_awaited:
            # In a thread, because drivers and a look at all processes take their time.
            claim = await asyncio.to_thread(rivals.claim, self._host.info, self._host.pid, self._host.state)
            await self._service.device.yield_device("rivals", claim)
            await asyncio.sleep(_RIVALS_INTERVAL_S)

    async def _keep_pace(self) -> None:
        power, before = Power(self._config), Speed(None)
        while power.is_limited:
            speed = await asyncio.to_thread(power.speed)
            if speed != before:
                before = speed
                self._host.set_pace(speed.tokens_per_second)
                self._service.doctor.is_paced = speed.tokens_per_second is not None
                limit = speed.tokens_per_second
                words = "as fast as it goes" if limit is None else f"{limit:g} tokens/s at most, {speed.reason}"
                log.info("the engine computes %s", words)
                self._service.events.add("engine", f"computes {words}")
            await asyncio.sleep(_POWER_INTERVAL_S)

    async def _suspend(self, within_s: float) -> None:
        """A GPU loses what it holds, or its driver keeps the machine awake; a CPU's engine just goes on afterwards."""
        info = self._host.info
        if info is not None and cuda_index(info.device) is not None:
            await self._service.device.yield_device("suspend", "the machine is suspended", within_s)

    async def _resume(self) -> None:
        """The engine's load is the probe: it is tried again until the device answers (`restart_policy.py`)."""
        await self._service.device.yield_device("suspend", None)

    async def _meter(self) -> None:
        """Once a second: energy, and a look at how the engine does."""
        while True:
            await asyncio.sleep(_METER_INTERVAL_S)
            self._service.doctor.look(self._host.stats)
            # In a thread, because a driver may take its time.
            device = info.device if (info := self._host.info) is not None else None
            self._service.metering.tick(await asyncio.to_thread(self._telemetry.read_energy, device))

    def _read_machine(self) -> Reading:
        info = self._host.info
        return self._telemetry.read(self._host.pid, info.device if info is not None else None)

    def _say_ready(self) -> None:
        info, model = self._host.info, self._service.model
        if info is None or model is None:
            return
        log.info(
            "ready: %s on %s, %s, %d KV blocks of %d tokens, up to %d tokens a request",
            model.name, info.device_name, info.dtype, info.num_blocks, info.block_size, info.max_request_tokens,
        )  # fmt: skip

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGHUP, self._on_hangup)

    def _on_hangup(self) -> None:
        """Reads the settings anew. When the terminal that the daemon was started at is gone, it stops."""
        if self._had_terminal and not has_terminal():
            self._on_signal(signal.SIGHUP)
            return
        systemd.notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        outcome = self._reload()
        self._service.events.add("reload", outcome)
        systemd.notify(f"STATUS={self._host.describe()}; reload: {outcome}")
        if self._was_ready:
            systemd.notify("READY=1")

    def _reload(self) -> str:
        """What came of it, in words that everybody may read."""
        self._service.reopen_logs()
        taken = self._reloader.reload()
        parts = [] if taken is not None else ["the settings are wrong and stay as they are; the log says why"]
        files: dict[str, Callable[[], bool]] = {
            "API keys": lambda: self._http.reload_keys(self._reloader.config.quota.key),
            "TLS certificate": self._http.reload_certificate,
        }
        for what, reread in files.items():
            try:
                if reread():
                    taken = [*(taken or ()), what]
            except PageddError as error:
                log.error("reload: %s as before: %s", what, error)
                parts.append(f"{what} as before, what is there now cannot be used; the log says why")
        if taken:
            parts.insert(0, f"taken over: {', '.join(taken)}")
        return "; ".join(parts) or "nothing has changed that can be taken over"

    def _set_log_level(self, config: DaemonConfig) -> None:
        logs.set_level(config.log_level)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stop_requested.is_set():
            log.warning("%s again: ending at once", number.name)
            # The kernel ends the engine process with this one.
            os._exit(128 + number)
        log.info("%s: finishing running requests for up to %g s", number.name, self._config.drain_seconds)
        self._stop_requested.set()

    async def _shut_down(self) -> None:
        """Running requests may finish, then get their terminal message; then sockets and engine go."""
        stop_usec = int((self._config.drain_seconds + _CLOSE_S) * 1_000_000)
        systemd.notify("STOPPING=1", "STATUS=finishing running requests", f"EXTEND_TIMEOUT_USEC={stop_usec}")
        self._service.begin_drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.drain_seconds):
                await self._service.drained()
        await self._service.close()
        for api in self._apis:
            await api.close()
        await self._host.stop()
        log.info("stopped")


def has_terminal() -> bool:
    """Whether this process belongs to a terminal. One that is closed sends SIGHUP, and then it no longer does."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


async def wait_for_fault(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Raises what ends one of them by an exception: `PageddError`, also for a fault, which is logged with its trace.

    A task that returns has nothing more to do; when all have, so does this.
    """
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    for task in done:
        if (error := task.exception()) is None:
            continue
        if isinstance(error, PageddError):
            raise error
        log.critical("fault in a task of the daemon, which ends: %s", task.get_name(), exc_info=error)
        raise PageddError("internal", f"{task.get_name()} broke; the log has the trace") from error


async def _feed_watchdog() -> None:
    """From the loop that does the work: systemd replaces a daemon in which it stands still."""
    if (interval_s := systemd.watchdog_interval_s()) is not None:
        while True:
            systemd.notify("WATCHDOG=1")
            await asyncio.sleep(interval_s)


def how_to_talk(endpoints: Endpoints, environ: Mapping[str, str] = os.environ) -> str:
    """The first commands to try, as they work in another terminal of this machine."""
    beside = Path(sys.executable).with_name("pagectl")
    pagectl = "pagectl" if shutil.which("pagectl") == str(beside) else shlex.quote(str(beside))
    elsewhere = {name: text for name, text in environ.items() if name != "PAGEDD_RUNTIME_DIR"}
    if client_endpoints(environ=elsewhere).directory != endpoints.directory:
        # A client that is not told would look where it always does.
        pagectl = f"PAGEDD_RUNTIME_DIR={shlex.quote(str(endpoints.directory))} {pagectl}"
    return f"""
In another terminal:

  {pagectl} generate "The capital of France is" --max-tokens 16 --temperature 0
  {pagectl} chat --temperature 0.2
  curl --unix-socket {shlex.quote(str(endpoints.http))} http://localhost/v1/chat/completions \\
    -H 'Content-Type: application/json' \\
    -d '{{"messages": [{{"role": "user", "content": "Hello!"}}], "temperature": 0.2}}'

Ctrl-C stops the daemon.
"""
