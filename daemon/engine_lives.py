"""One engine process after another: when the next one starts, and why; sleep, wake and the change of settings.

Owns the engine's state. `engine_child.py` is one process, `restart_policy.py` says when one that died is followed,
`engine_swap.py` what happens between two settings. What is said to an engine and what it answers is `engine_host.py`'s.
One event loop, no thread. No torch.
"""

import asyncio
import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from pagedd.client.errors import PageddError
from pagedd.daemon import engine_state
from pagedd.daemon.engine_child import Ended, EngineChild
from pagedd.daemon.engine_link import CLOSE_LIMIT_S, FromEngine, Hello, Loading, Ready, ToEngine
from pagedd.daemon.engine_state import EngineState
from pagedd.daemon.engine_swap import Swap
from pagedd.daemon.engine_watch import SilenceLimits
from pagedd.daemon.restart_policy import RestartPolicy, on_the_cpu
from pagedd.engine.config import EngineConfig
from pagedd.engine.info import EngineInfo

log = logging.getLogger(__name__)

ENGINE_COMMAND: Sequence[str] = (sys.executable, "-P", "-m", "pagedd.daemon.engine_process")

_EXIT_TIMEOUT_S = 3.0


class EngineLives(ABC):
    """The processes behind an `EngineHost`, which hears through `_hear` and `_lose` what they say and how they end.

    Attributes:
        state, progress, detail: for people and for `/health`; `progress` is 0–1 of the load.
        failure: why `state` is FAILED.
        trace: where the threads of the newest engine that died were, as far as it could say.
        num_restarts: engines that died and were replaced.
        on_state: called at every change of state, progress or detail.
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
        self._socket_path = socket_path
        self._command = tuple(command or ENGINE_COMMAND)
        self._child: EngineChild | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._config: EngineConfig | None = None
        self._swap: Swap | None = None  # until its engine is ready, or the one before is to be loaded again
        self._stopping = asyncio.Event()
        self._wakes = asyncio.Event()
        self._is_sleeping = False
        self._changed = asyncio.Event()

        self.state = EngineState.STARTING
        self.progress = 0.0
        self.detail = "starting"
        self.failure: PageddError | None = None
        self.trace = ""
        self.num_restarts = 0
        self.on_state: Callable[[], None] = lambda: None

    @abstractmethod
    def _hear(self, message: FromEngine) -> None:
        """What the engine says, before the state changes by it."""

    @abstractmethod
    def _lose(self, ended: Ended) -> None:
        """The engine has ended, and nothing comes of what it was asked."""

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child is not None else None

    @property
    def has_fallen_back(self) -> bool:
        """The CPU serves, because the configured device was away for too long."""
        return self._policy.has_fallen_back

    def check_ready(self) -> None:
        """Raises what `submit` would raise now."""
        engine_state.check_ready(self.state, self.progress, self.detail)

    def describe(self) -> str:
        """The state in words, e.g. `loading, 43 % (weights)`."""
        return engine_state.in_words(self.state, self.progress, self.detail)

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
        """Whoever asks from now on waits for the next engine, and a `wake` before this counts for nothing.

        Raises like `submit`.
        """
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
        """Starts the engine again when it sleeps, or once it does. No effect when nobody put it to sleep."""
        self._wakes.set()
        if self.state is EngineState.ASLEEP:
            self._enter(EngineState.STARTING, "engine process")

    async def swap(self, config: EngineConfig, take_over: Callable[[], None], take_back: Callable[[], None]) -> None:
        """Starts an engine with `config` in place of the one that is ready or asleep, and keeps to it from then on.

        An engine that is ready is told to exit, with whatever runs in it. Returns when the new one is ready. Where that
        cannot load, another is started with the settings before, and this raises `PageddError` with the reason, once
        that is ready or cannot load either.

        Args:
            take_over: called when the engine before has ended and none with `config` has begun to load.
            take_back: called after that, before the settings of before are loaded again.
        """
        if self.state not in (EngineState.ASLEEP, EngineState.STALLED):
            self.check_ready()
        swap = self._swap = Swap(config, take_over, take_back)
        self._is_sleeping = True
        self._tell_to_exit()
        self.wake()
        while self._is_sleeping and self.state is not EngineState.STOPPED:
            await self.wait_changed()
        if swap.failure is not None:
            raise swap.failure
        if not swap.is_done:
            self.check_ready()

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
        elif self._child is not None:
            self._child.end_at_once()
        await self._supervisor

    def _send(self, message: ToEngine) -> None:
        """Raises `PageddError`: engine_loading, engine_died, engine_failed or shutting_down."""
        self.check_ready()
        if self._child is None or not self._child.send(message):
            raise PageddError("engine_died", "the engine process has just ended; try again shortly")

    def _tell_to_exit(self) -> None:
        """The engine process ends, or hangs after `_EXIT_TIMEOUT_S`; with a disk tier it has `CLOSE_LIMIT_S` more."""
        if self._child is not None:
            has_disk_tier = self._config is not None and self._config.kv_disk_gib > 0
            self._child.tell_to_exit(_EXIT_TIMEOUT_S + (CLOSE_LIMIT_S if has_disk_tier else 0.0))

    # What follows what

    async def _supervise(self, arguments: tuple[str, ...]) -> None:
        try:
            await self._keep_running(arguments)
        except PageddError as error:
            log.error("%s", error)
            self._lose(Ended(error.message))
            self._fail(error)
        except Exception:
            # Nobody would start another engine, so nobody must go on waiting for one.
            log.exception("fault in the supervision of the engine process")
            self._fail(PageddError("internal", "the engine process is no longer supervised; the log has the trace"))

    async def _keep_running(self, arguments: tuple[str, ...]) -> None:
        while True:
            if self._swap is not None:
                self._config = self._swap.begin(self._config)
            ended = await self._run_once(arguments)
            reason = ended.reason
            self._lose(ended)
            if self._stopping.is_set():
                return
            if self._is_sleeping and ended.served_s is not None:
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
            if self._swap is not None:
                log.error("%s; the model before is loaded again", reason)
                self._config = self._swap.undo(ended.load_failure or PageddError("engine_failed", reason))
                self._swap = None
                continue
            self._is_sleeping = False
            had_fallen_back = self.has_fallen_back
            if ended.served_s is None:
                delay_s = self._policy.after_failed_load(ended.load_failure.code if ended.load_failure else None)
            else:
                delay_s = self._policy.after_serving(ended.served_s)
            if delay_s is None:
                self._fail(ended.load_failure or PageddError("engine_failed", reason))
                return
            if self.has_fallen_back and not had_fallen_back:
                reason += "; the CPU serves in its place until the daemon is started again"
                log.warning("%s", reason)
            else:
                log.error("%s; starting another in %.2g s", reason, delay_s)
            self.num_restarts += 1
            self._enter(EngineState.RESTARTING, reason)
            with suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._stopping.wait()
            if self._stopping.is_set():
                return

    async def _run_once(self, arguments: tuple[str, ...]) -> Ended:
        """One engine process from its start to its end. Raises like `EngineChild.run`."""
        self._enter(EngineState.STARTING, "engine process")
        child = EngineChild(self._command, self._socket_path, self._silence, self._on_message, self._on_stalled)
        self._child = child
        try:
            return await child.run(arguments)
        finally:
            self._child = None
            self.trace = child.trace

    def _on_stalled(self) -> None:
        if self.state is EngineState.READY:
            self._enter(EngineState.STALLED, f"no step has ended for over {self._silence.stalled_s:g} s", 1.0)
            log.warning("the engine process is %s", self.describe())

    def _on_message(self, message: FromEngine) -> None:
        if self.state is EngineState.STALLED:
            self._enter(EngineState.READY, "", 1.0)
        self._hear(message)
        match message:
            case Hello():
                self._begin_loading()
            case Loading(fraction=fraction, what=what):
                self._enter(EngineState.LOADING, what, fraction)
            case Ready(info=info):
                self._serve(info)

    def _begin_loading(self) -> None:
        """When both are there, the engine process and the order to load."""
        if self._config is not None and self._child is not None and self._child.has_said_hello:
            self._enter(EngineState.LOADING, "libraries")
            self._child.load(on_the_cpu(self._config) if self.has_fallen_back else self._config)

    def _serve(self, info: EngineInfo) -> None:
        self._policy.serves()
        if self._swap is not None:
            self._swap.is_done = True
            self._swap = None
        if self._config is not None and not self.has_fallen_back:
            # Measured once, not at every wake.
            self._config = replace(self._config, kv_quality=info.kv_quality)
        self._is_sleeping = False
        self._enter(EngineState.READY, "", 1.0)

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
