"""One engine process, from its start to its end: the socket to it, and the watch over its silence.

`engine_lives.py` starts one after another, hears what each says and decides what follows. Owns how a process is ended,
kindly or not, and how it ended in words. How long is too long is `engine_watch.py`'s. One event loop. No torch.
"""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pagedd.client.endpoints import ipc
from pagedd.client.errors import PageddError
from pagedd.daemon import fatal_trace
from pagedd.daemon.engine_link import Exit, FromEngine, Hello, LoadFailed, Loading, Ready, Start, ToEngine
from pagedd.daemon.engine_socket import EngineSocket
from pagedd.daemon.engine_watch import TICK_S, EngineWatch, Progress, SilenceLimits
from pagedd.engine.config import EngineConfig

log = logging.getLogger(__name__)

_ENVIRONMENT = {
    # CUDA's own order is by speed; in this one `cuda:1` is NVML's device 1 too.
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    # A step's tensors of some MiB are freed at once and wanted again in the next. By its own rules the C library gives
    # their memory back each time, and new pages then cost up to twice what is computed in them. It heeds either setting
    # only beside the other.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}
_HELLO_TIMEOUT_S = 60.0
# A hung engine gets this long to write where it hangs, and the kernel this long to end it.
_TRACE_S = 0.5
_KILL_TIMEOUT_S = 10.0


class Ended(NamedTuple):
    """How an engine process ended.

    Attributes:
        reason: in words.
        as_told: by itself, after it was told to.
        load_failure: why its load failed, as it said itself.
        served_s: how long it was ready; None when it never was.
    """

    reason: str
    as_told: bool = False
    load_failure: PageddError | None = None
    served_s: float | None = None


class EngineChild:
    """One process; `run` starts it and returns when it has ended.

    Attributes:
        pid: None while there is none.
        has_said_hello: it is up, and waits to be told what to load.
        trace: once it has ended, where its threads were, as far as it could say.
    """

    def __init__(
        self,
        command: Sequence[str],
        socket_path: Path,
        silence: SilenceLimits,
        on_message: Callable[[FromEngine], None],
        on_stalled: Callable[[], None],
    ) -> None:
        """`socket_path` is where both meet. `on_stalled` is called again and again while a step does not end."""
        self.pid: int | None = None
        self.has_said_hello = False
        self.trace = ""
        self._command = command
        self._socket_path = socket_path
        self._trace_path = socket_path.with_suffix(".trace")
        self._silence = silence
        self._watch = EngineWatch(silence)
        self._on_message = on_message
        self._on_stalled = on_stalled
        self._socket: EngineSocket | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._loads = ""  # what it has said that it loads
        self._has_begun_loading = False
        self._load_failure: PageddError | None = None
        self._ready_since_s: float | None = None
        self._exit_limit_s: float | None = None  # of one that was told to exit; it must by `_exit_due_s`
        self._exit_due_s = 0.0

    async def run(self, arguments: Sequence[str]) -> Ended:
        """The process's whole life. Raises `PageddError("engine_failed")` when it hangs and cannot be ended."""
        hello_timer: asyncio.TimerHandle | None = None
        try:
            self._socket = EngineSocket(self._socket_path, self._hear)
            process = await asyncio.create_subprocess_exec(
                *self._command,
                "--link",
                ipc(self._socket_path),
                "--parent",
                str(os.getpid()),
                "--trace",
                str(self._trace_path),
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                env=_ENVIRONMENT | os.environ,
            )
            self._process, self.pid = process, process.pid
            if self._exit_limit_s is not None:  # nobody wants it any more
                self.kill()
            hello_timer = asyncio.get_running_loop().call_later(_HELLO_TIMEOUT_S, self._kill_if_mute)
            hung = await self._watch_until_exit(process)
        except OSError as error:
            return Ended(f"the engine process could not be started: {error}")
        finally:
            if hello_timer is not None:
                hello_timer.cancel()
            self.kill()  # no effect on one that has ended
            if self._socket is not None:
                self._socket.close()
            self._socket = self._process = self.pid = None
            self.trace = fatal_trace.take(self._trace_path)
        if self._load_failure is not None:
            return Ended(f"the engine could not load: {self._load_failure}", load_failure=self._load_failure)
        status = process.returncode or 0
        return Ended(
            f"the engine process (pid {process.pid}) {hung or _how_it_ended(status)}",
            as_told=self._exit_limit_s is not None and hung is None and status == 0,
            served_s=None if self._ready_since_s is None else time.monotonic() - self._ready_since_s,
        )

    def send(self, message: ToEngine) -> bool:
        """False when there is no process to hear it."""
        if self._socket is None:
            return False
        self._socket.send(message)
        return True

    def load(self, config: EngineConfig) -> None:
        """Tells it what to load, once it has said hello."""
        self._has_begun_loading, self._loads = True, "libraries"
        self._watch.heard()
        self.send(Start(config=config))

    def tell_to_exit(self, within_s: float) -> None:
        """It ends by itself, or hangs after so long. No effect a second time."""
        if self._exit_limit_s is None and self.send(Exit()):
            self._expect_exit(within_s)

    def end_at_once(self) -> None:
        """Kills it, which takes the kernel a moment."""
        self._expect_exit(_KILL_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()

    def _expect_exit(self, within_s: float) -> None:
        self._exit_limit_s, self._exit_due_s = within_s, time.monotonic() + within_s

    def _hear(self, message: FromEngine) -> None:
        self._watch.heard()
        match message:
            case Hello():
                self.has_said_hello = True
            case Loading(what=what):
                self._loads = what
            case Ready():
                self._ready_since_s = time.monotonic()
            case LoadFailed(code=code, message=text):
                self._load_failure = PageddError(code, text)
                # It waits for this, so that its reason is here before its exit status.
                self.send(Exit())
        self._on_message(message)

    async def _watch_until_exit(self, process: asyncio.subprocess.Process) -> str | None:
        """Returns when the process has ended; why it had to be, when it hung."""
        exit = asyncio.create_task(process.wait())
        try:
            while not exit.done():
                await asyncio.wait({exit}, timeout=TICK_S)
                if not exit.done() and (hung := self._look()) is not None:
                    log.error("the engine process (pid %d) %s; it is ended", process.pid, hung)
                    await self._end_hung(process, exit)
                    return hung
            return None
        finally:
            exit.cancel()

    def _look(self) -> str | None:
        """What to say of an engine whose step, load or life does not end; None while it may still."""
        if self._exit_limit_s is not None:
            is_late = time.monotonic() >= self._exit_due_s
            return f"hung: it did not end within {self._exit_limit_s:g} s of being told to" if is_late else None
        if not self._has_begun_loading:
            self._watch.heard()  # nothing is asked of it yet
            return None
        is_loading = self._ready_since_s is None
        match self._watch.tick(is_loading=is_loading):
            case Progress.HUNG if is_loading:
                return f"hung: its load did not get on for {self._silence.load_s:g} s ({self._loads})"
            case Progress.HUNG:
                return f"hung: no step ended within {self._silence.hung_s:g} s"
            case Progress.STALLED:
                self._on_stalled()
        return None

    async def _end_hung(self, process: asyncio.subprocess.Process, exit: "asyncio.Task[int]") -> None:
        """Has it write where it hangs, then kills it. Raises `PageddError("engine_failed")` when that has no effect."""
        with suppress(ProcessLookupError):
            process.send_signal(fatal_trace.TRACE_SIGNAL)
        await asyncio.wait({exit}, timeout=_TRACE_S)
        self.kill()
        await asyncio.wait({exit}, timeout=_KILL_TIMEOUT_S)
        if not exit.done():
            raise PageddError("engine_failed", f"the hung engine process (pid {process.pid}) cannot be ended")

    def _kill_if_mute(self) -> None:
        if not self.has_said_hello:
            log.error("the engine process said nothing for %d s; it is ended", _HELLO_TIMEOUT_S)
            self.kill()


def _how_it_ended(status: int) -> str:
    """An exit status as asyncio gives it, negative for a signal, in words."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = " (the kernel's out-of-memory killer does that too)" if -status == signal.SIGKILL else ""
    return f"was ended by {name}{hint}"
