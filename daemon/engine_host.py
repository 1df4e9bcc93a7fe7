"""Starts the engine process, watches it, starts it again, and speaks for it to the rest of the front.

`Service` calls `submit`, `abort`, `set_priority` and asks, and sets the callbacks; `server.py` starts and stops.
Owns the process and its state, not the requests in it: when the engine dies `on_lost` tells their owner.
One event loop, no thread; every callback runs in the loop. No torch.
"""

import asyncio
import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import NamedTuple, TypeVar

from pagedd.client.endpoints import ipc
from pagedd.client.errors import PageddError
from pagedd.client.percent import percent
from pagedd.daemon import fatal_trace
from pagedd.daemon.engine_link import (
    CLOSE_LIMIT_S,
    Abort,
    Add,
    Answer,
    Block,
    Evicted,
    EvictPrefix,
    Exit,
    FromEngine,
    GetBlock,
    GetPrefixes,
    GetSnapshot,
    Hello,
    Idle,
    LoadFailed,
    Loading,
    Prefixes,
    Question,
    Ready,
    Refused,
    SetPriority,
    Snapshot,
    Start,
    StepDone,
)
from pagedd.daemon.engine_socket import EngineSocket
from pagedd.daemon.engine_watch import TICK_S, EngineWatch, Progress, SilenceLimits
from pagedd.daemon.restart_policy import RestartPolicy
from pagedd.engine.config import EngineConfig
from pagedd.engine.info import EngineInfo
from pagedd.engine.kv.prefix_tree import PrefixTree
from pagedd.engine.request import Preemption, Request, SequenceOutput
from pagedd.engine.stats import BlockInfo, EngineSnapshot, EngineStats

log = logging.getLogger(__name__)

ENGINE_COMMAND: Sequence[str] = (sys.executable, "-P", "-m", "pagedd.daemon.engine_process")

_ENGINE_ENVIRONMENT = {
    # CUDA's own order is by speed; in this one `cuda:1` is NVML's device 1 too.
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    # A step's tensors of some MiB are freed at once and wanted again in the next. By its own rules the C library gives
    # their memory back each time, and new pages then cost up to twice what is computed in them. It heeds either setting
    # only beside the other.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}
_HELLO_TIMEOUT_S = 60.0
_EXIT_TIMEOUT_S = 3.0
# A hung engine gets this long to write where it hangs, and the kernel this long to end it.
_TRACE_S = 0.5
_KILL_TIMEOUT_S = 10.0


_Answer = TypeVar("_Answer", Snapshot, Block, Prefixes, Evicted)


class EngineState(Enum):
    """Where the engine process is in its life. Changed only by `EngineHost`."""

    STARTING = "starting"  # nothing loads yet: the model is being fetched or the process comes up
    LOADING = "loading"
    READY = "ready"
    STALLED = "stalled"  # it was ready, and has been in one step for long
    RESTARTING = "restarting"  # it died; the next one starts after a pause
    FAILED = "failed"  # it cannot be started; `detail` says why
    ASLEEP = "asleep"  # there is none, on purpose, until somebody wakes it
    STOPPED = "stopped"


class EngineHost:
    """The engine as the front sees it. `on_lost` tells of one that died, `on_ended` of one that ended as it was told.

    Attributes:
        state, progress, detail: for people and for `/health`; `progress` is 0–1 of the load.
        failure: why `state` is FAILED.
        info: what the engine chose, once it is ready; None while there is none.
        stats: the newest figures; None while there is no engine.
        pid: of the engine process; None while there is none.
        trace: where the threads of the newest engine that died were, as far as it could say.
        num_restarts: engines that died and were replaced.
        on_preempted, on_outputs, on_refused, on_lost, on_ended, on_state: set by `Service`.
    """

    def __init__(
        self,
        socket_path: Path,
        command: Sequence[str] | None = None,
        policy: RestartPolicy | None = None,
        silence: SilenceLimits | None = None,
    ) -> None:
        """`socket_path` is where front and engine meet; `command` is what to run instead of the engine process."""
        self._policy = policy or RestartPolicy()
        self._silence = silence or SilenceLimits()
        self._watch = EngineWatch(self._silence)
        self._socket_path = socket_path
        self._trace_path = socket_path.with_suffix(".trace")
        self._command = tuple(command or ENGINE_COMMAND)
        self._socket: EngineSocket | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._questions: deque[asyncio.Future[Answer]] = deque()
        self._config: EngineConfig | None = None
        self._has_said_hello = False
        self._load_failure: PageddError | None = None
        self._ready_since_s: float | None = None
        self._stopping = asyncio.Event()
        self._wakes = asyncio.Event()
        self._is_sleeping = False
        self._exit_limit_s: float | None = None  # of an engine that was told to exit; it must by `_exit_due_s`
        self._exit_due_s = 0.0
        self._changed = asyncio.Event()

        self.state = EngineState.STARTING
        self.progress = 0.0
        self.detail = "starting"
        self.failure: PageddError | None = None
        self.info: EngineInfo | None = None
        self.stats: EngineStats | None = None
        self.pid: int | None = None
        self.trace = ""
        self.num_restarts = 0
        self.on_preempted: Callable[[list[Preemption]], None] = lambda preemptions: None
        self.on_outputs: Callable[[list[SequenceOutput]], None] = lambda outputs: None
        self.on_refused: Callable[[str, str, str], None] = lambda request_id, code, message: None
        self.on_lost: Callable[[str], None] = lambda reason: None
        self.on_ended: Callable[[], None] = lambda: None
        self.on_state: Callable[[], None] = lambda: None

    # What the service asks

    def submit(self, request: Request) -> None:
        """Hands a request to the engine. Its outputs come through `on_outputs`, a refusal through `on_refused`.

        Raises `PageddError`: engine_loading, engine_died, engine_failed or shutting_down.
        """
        self._ready_socket().send(Add(request=request))

    def abort(self, request_id: str, choice_index: int | None = None) -> None:
        """Ends a request, or one choice of it, before the engine's next step. No effect when there is no engine."""
        if self._socket is not None and self.state is not EngineState.STOPPED:
            self._socket.send(Abort(request_id=request_id, choice_index=choice_index))

    def set_priority(self, request_id: str, priority: int) -> None:
        """Moves a live request in the queue. Raises like `submit`."""
        self._ready_socket().send(SetPriority(request_id=request_id, priority=priority))

    async def snapshot(self) -> EngineSnapshot:
        """Every block and sequence between two steps. Raises like `submit`, also when the engine dies meanwhile."""
        return (await self._ask(GetSnapshot(), Snapshot)).snapshot

    async def block(self, index: int) -> BlockInfo | None:
        """What `Engine.block` says. Raises like `snapshot`."""
        return (await self._ask(GetBlock(index), Block)).block

    async def prefixes(self, limit: int) -> PrefixTree:
        """What `Engine.prefixes` says. Raises like `snapshot`."""
        return (await self._ask(GetPrefixes(limit), Prefixes)).tree

    async def evict_prefix(self, digest: bytes) -> tuple[int, int] | None:
        """What `Engine.evict_prefix` says. Raises like `snapshot`."""
        return (await self._ask(EvictPrefix(digest), Evicted)).num_blocks

    async def _ask(self, question: Question, kind: type[_Answer]) -> _Answer:
        socket = self._ready_socket()
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        # The engine answers in order, so the oldest future is always the next one to be answered.
        self._questions.append(future)
        socket.send(question)
        answer = await future
        assert isinstance(answer, kind)
        return answer

    @property
    def has_fallen_back(self) -> bool:
        """The CPU serves, because the configured device was away for too long."""
        return self._policy.has_fallen_back

    def check_ready(self) -> None:
        """Raises what `submit` would raise now."""
        match self.state:
            case EngineState.READY:
                return
            case EngineState.STARTING | EngineState.LOADING:
                raise PageddError("engine_loading", f"{self.describe()}; try again shortly")
            case EngineState.RESTARTING:
                raise PageddError("engine_died", f"{self.detail}; try again shortly")
            case EngineState.STALLED:
                raise PageddError("engine_stalled", f"{self.detail}; try again shortly")
            case EngineState.ASLEEP:
                raise PageddError("engine_asleep", "the engine has just been put to sleep; try again")
            case EngineState.FAILED:
                raise PageddError("engine_failed", f"{self.detail}; see the daemon's log")
            case EngineState.STOPPED:
                raise PageddError("shutting_down", "the daemon is stopping")

    def describe(self) -> str:
        """The state in words, e.g. `loading, 43 % (weights)`."""
        if self.state in (EngineState.STARTING, EngineState.LOADING):
            return f"loading, {percent(self.progress)} % ({self.detail})"
        return f"{self.state.value}: {self.detail}" if self.detail else self.state.value

    # What the server does

    def report(self, progress: float, detail: str) -> None:
        """Shows what goes on before the engine can start, such as the fetching of the model."""
        self._enter(EngineState.STARTING, detail, progress)

    async def start(self, *, log_level: str = "info", log_format: str = "auto") -> None:
        """Starts the engine process, which imports its libraries and waits for `load`."""
        arguments = ("--log-level", log_level, "--log-format", log_format)
        self._supervisor = asyncio.create_task(self._supervise(arguments), name="engine supervisor")

    def load(self, config: EngineConfig) -> None:
        """Has the engine load its model, and every engine after it; `wait_changed` and `state` tell how that goes."""
        self._config = config
        self._begin_loading()

    async def wait_changed(self) -> None:
        """Returns at the next change of state, progress or detail."""
        await self._changed.wait()

    @property
    def is_sleeping(self) -> bool:
        """From `begin_sleep` until the engine is ready again, or fails."""
        return self._is_sleeping

    def begin_sleep(self) -> None:
        """Whoever asks from now on waits for the next engine. Raises like `submit`."""
        self.check_ready()
        self._is_sleeping = True
        self._wakes.clear()

    async def sleep(self) -> None:
        """Ends the engine process after `begin_sleep`, and starts none until `wake`. One that dies instead is lost,
        and stays away all the same.

        Raises `PageddError("engine_failed")` when it cannot be ended.
        """
        if self._is_sleeping and self.state in (EngineState.READY, EngineState.STALLED):
            self._tell_to_exit()
        while self._is_sleeping and self.state not in (EngineState.ASLEEP, EngineState.STOPPED):
            if self._wakes.is_set():
                return
            await self.wait_changed()
        if self.state is EngineState.FAILED:
            self.check_ready()

    def wake(self) -> None:
        """Starts the engine again when it sleeps. No effect when it does not."""
        self._wakes.set()

    async def stop(self) -> None:
        """Ends the engine process, kindly when it is ready and at once when it loads. Safe to call twice."""
        is_serving = self.state in (EngineState.READY, EngineState.STALLED)
        self._stopping.set()
        self._wakes.set()
        if self.state is not EngineState.FAILED:
            self._enter(EngineState.STOPPED, "")
        if self._supervisor is None:
            return
        if is_serving:
            self._tell_to_exit()
        else:
            self._expect_exit(0.0)
            self._kill()
        await self._supervisor

    def _tell_to_exit(self) -> None:
        """The engine process ends, or hangs after `_EXIT_TIMEOUT_S`; with a disk tier it has `CLOSE_LIMIT_S` more."""
        if self._socket is not None and self._exit_limit_s is None:
            self._socket.send(Exit())
            has_disk_tier = self._config is not None and self._config.kv_disk_gib > 0
            self._expect_exit(_EXIT_TIMEOUT_S + (CLOSE_LIMIT_S if has_disk_tier else 0.0))

    def _expect_exit(self, within_s: float) -> None:
        self._exit_limit_s, self._exit_due_s = within_s, time.monotonic() + within_s

    # The life of engines

    async def _supervise(self, arguments: tuple[str, ...]) -> None:
        try:
            await self._keep_running(arguments)
        except PageddError as error:
            log.error("%s", error)
            self._forget_engine(_Ended(error.message))
            self._fail(error)
        except Exception:
            # Nobody would start another engine, so nobody must go on waiting for one.
            log.exception("fault in the supervision of the engine process")
            self._fail(PageddError("internal", "the engine process is no longer supervised; the log has the trace"))
            self._kill()

    async def _keep_running(self, arguments: tuple[str, ...]) -> None:
        while True:
            ended = await self._run_once(arguments)
            reason = ended.reason
            ready_since_s, self._ready_since_s = self._ready_since_s, None
            self._forget_engine(ended)
            if self._stopping.is_set():
                return
            if self._is_sleeping and ready_since_s is not None:
                if ended.as_told:
                    log.info("the engine sleeps; its process has ended")
                else:
                    log.error("%s before it slept; another starts when it is woken", reason)
                    self.num_restarts += 1
                detail = "a request wakes it"
                self._enter(EngineState.ASLEEP, detail if ended.as_told else f"{reason}; {detail}")
                await self._wakes.wait()
                if self._stopping.is_set():
                    return
                continue
            self._is_sleeping = False
            had_fallen_back = self.has_fallen_back
            if ready_since_s is None:
                code = self._load_failure.code if self._load_failure is not None else None
                delay_s = self._policy.after_failed_load(code)
            else:
                delay_s = self._policy.after_serving(time.monotonic() - ready_since_s)
            if delay_s is None:
                self._fail(self._load_failure or PageddError("engine_failed", reason))
                return
            if self.has_fallen_back and not had_fallen_back:
                reason += "; the CPU serves in its place until the daemon is started again"
                log.warning("%s", reason)
            else:
                log.error("%s; starting another in %.2g s", reason, delay_s)
            self.num_restarts += 1
            self._enter(EngineState.RESTARTING, reason)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay_s)
            if self._stopping.is_set():
                return

    async def _run_once(self, arguments: tuple[str, ...]) -> "_Ended":
        """One engine process from its start to its end; returns how it ended.

        Raises `PageddError("engine_failed")` when it cannot be ended.
        """
        self._load_failure = None
        self._enter(EngineState.STARTING, "engine process")
        self._has_said_hello = False
        self._exit_limit_s = None
        try:
            self._socket = EngineSocket(self._socket_path, self._on_message)
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
                env=_ENGINE_ENVIRONMENT | os.environ,
            )
            self._process, self.pid = process, process.pid
            if self._stopping.is_set():
                self._kill()
            hello_timer = asyncio.get_running_loop().call_later(_HELLO_TIMEOUT_S, self._kill_if_mute)
            hung = await self._watch_until_exit(process)
            hello_timer.cancel()
        except OSError as error:
            return _Ended(f"the engine process could not be started: {error}")
        finally:
            if self._socket is not None:
                self._socket.close()
            self._socket = self._process = self.pid = None
            self.trace = fatal_trace.take(self._trace_path)
        if self._load_failure is not None:
            return _Ended(f"the engine could not load: {self._load_failure}")
        status = process.returncode or 0
        return _Ended(
            f"the engine process (pid {process.pid}) {hung or _how_it_ended(status)}",
            as_told=self._exit_limit_s is not None and hung is None and status == 0,
        )

    async def _watch_until_exit(self, process: asyncio.subprocess.Process) -> str | None:
        """Returns when the process has ended; why it had to be, when it hung."""
        exit = asyncio.create_task(process.wait())
        self._watch = EngineWatch(self._silence)
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
        if self.state not in (EngineState.LOADING, EngineState.READY, EngineState.STALLED):
            self._watch.heard()  # nothing is asked of it yet
            return None
        is_loading = self.state is EngineState.LOADING
        match self._watch.tick(is_loading=is_loading):
            case Progress.HUNG if is_loading:
                return f"hung: its load did not get on for {self._silence.load_s:g} s ({self.detail})"
            case Progress.HUNG:
                return f"hung: no step ended within {self._silence.hung_s:g} s"
            case Progress.STALLED if self.state is EngineState.READY:
                self._enter(EngineState.STALLED, f"no step has ended for over {self._silence.stalled_s:g} s", 1.0)
                log.warning("the engine process is %s", self.describe())
        return None

    async def _end_hung(self, process: asyncio.subprocess.Process, exit: "asyncio.Task[int]") -> None:
        """Has it write where it hangs, then kills it. Raises `PageddError("engine_failed")` when that has no effect."""
        with suppress(ProcessLookupError):
            process.send_signal(fatal_trace.TRACE_SIGNAL)
        await asyncio.wait({exit}, timeout=_TRACE_S)
        self._kill()
        await asyncio.wait({exit}, timeout=_KILL_TIMEOUT_S)
        if not exit.done():
            raise PageddError("engine_failed", f"the hung engine process (pid {process.pid}) cannot be ended")

    def _on_message(self, message: FromEngine) -> None:
        self._watch.heard()
        if self.state is EngineState.STALLED:
            self._enter(EngineState.READY, "", 1.0)
        match message:
            case Idle():
                pass
            case StepDone(outputs=outputs, stats=stats, preemptions=preemptions):
                self.stats = stats
                if preemptions:
                    self.on_preempted(preemptions)
                # Also when nobody drew a token: a step in the middle of a prefill counts.
                self.on_outputs(outputs)
            case Refused(request_id=request_id, code=code, message=text):
                self.on_refused(request_id, code, text)
            case Snapshot() | Block() | Prefixes() | Evicted():
                answer = self._questions.popleft()
                if not answer.done():
                    answer.set_result(message)
            case Hello():
                self._has_said_hello = True
                self._begin_loading()
            case Loading(fraction=fraction, what=what):
                self._enter(EngineState.LOADING, what, fraction)
            case Ready(info=info, stats=stats):
                self.info, self.stats = info, stats
                if self._config is not None and not self.has_fallen_back:
                    # Measured once, not at every wake.
                    self._config = replace(self._config, kv_quality=info.kv_quality)
                self._ready_since_s = time.monotonic()
                self._is_sleeping = False
                self._enter(EngineState.READY, "", 1.0)
            case LoadFailed(code=code, message=text):
                self._load_failure = PageddError(code, text)
                # It waits for this, so that its reason is here before its exit status.
                if self._socket is not None:
                    self._socket.send(Exit())

    def _begin_loading(self) -> None:
        """When both are there, the engine process and the order to load."""
        if self._has_said_hello and self._config is not None and self._socket is not None:
            self._enter(EngineState.LOADING, "libraries")
            self._watch.heard()
            config = on_the_cpu(self._config) if self.has_fallen_back else self._config
            self._socket.send(Start(config=config))

    def _ready_socket(self) -> EngineSocket:
        self.check_ready()
        if self._socket is None:
            raise PageddError("engine_died", "the engine process has just ended; try again shortly")
        return self._socket

    def _enter(self, state: EngineState, detail: str, progress: float = 0.0) -> None:
        if self._stopping.is_set() and state is not EngineState.STOPPED:
            # Whatever the engine still says on its way out.
            return
        self.state, self.detail, self.progress = state, detail, progress
        self._changed.set()
        self._changed.clear()
        self.on_state()

    def _fail(self, failure: PageddError) -> None:
        self.failure = failure
        self._is_sleeping = False
        self._enter(EngineState.FAILED, str(failure))

    def _forget_engine(self, ended: "_Ended") -> None:
        while self._questions:
            answer = self._questions.popleft()
            if not answer.done():
                answer.set_exception(PageddError("engine_died", ended.reason))
        if self.info is not None:
            try:
                # With the last figures still there, for whoever sums them up.
                if ended.as_told:
                    self.on_ended()
                else:
                    self.on_lost(ended.reason)
            except Exception:
                log.exception("fault while the loss of the engine was told; the next one starts all the same")
        self.info = self.stats = None

    def _kill(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()

    def _kill_if_mute(self) -> None:
        if not self._has_said_hello:
            log.error("the engine process said nothing for %d s; it is ended", _HELLO_TIMEOUT_S)
            self._kill()


class _Ended(NamedTuple):
    """How an engine process ended, in words; `as_told`: by itself, after it was told to."""

    reason: str
    as_told: bool = False


def on_the_cpu(config: EngineConfig) -> EngineConfig:
    """The same on a CPU; what was meant for a card's memory and arithmetic is chosen anew."""
    return replace(
        config,
        device="cpu",
        dtype="auto",
        kv_cache_dtype="auto",
        kv_quality=None,
        num_blocks=None,
        gpu_memory_utilization=None,
        max_num_batched_tokens=None,
        async_scheduling="auto",
    )


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
