"""The engine as the rest of the front sees it: what it is asked, its sleep, and one process after another behind it.

`Service` calls `submit`, `abort`, `set_priority` and asks, and sets the callbacks; `server.py` starts and stops.
Owns the engine's state and when another process follows (`engine_child.py` is one), not the requests in it: when the
engine dies `on_lost` tells their owner.
One event loop, no thread; every callback runs in the loop. No torch.
"""

import asyncio
import logging
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from pagedd.client.errors import PageddError
from pagedd.daemon import engine_state
from pagedd.daemon.engine_child import Ended, EngineChild
from pagedd.daemon.engine_link import (
    CLOSE_LIMIT_S,
    Abort,
    Add,
    Answer,
    Block,
    Evicted,
    EvictPrefix,
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
    SetPace,
    SetPriority,
    Snapshot,
    StepDone,
    ToEngine,
)
from pagedd.daemon.engine_state import EngineState
from pagedd.daemon.engine_swap import Swap
from pagedd.daemon.engine_watch import SilenceLimits
from pagedd.daemon.restart_policy import RestartPolicy, on_the_cpu
from pagedd.engine.config import EngineConfig
from pagedd.engine.info import EngineInfo
from pagedd.engine.kv.prefix_tree import PrefixTree
from pagedd.engine.request import Preemption, Request, SequenceOutput
from pagedd.engine.stats import BlockInfo, EngineSnapshot, EngineStats, Eviction

log = logging.getLogger(__name__)

ENGINE_COMMAND: Sequence[str] = (sys.executable, "-P", "-m", "pagedd.daemon.engine_process")

_EXIT_TIMEOUT_S = 3.0

_Answer = TypeVar("_Answer", Snapshot, Block, Prefixes, Evicted)


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
        self._socket_path = socket_path
        self._command = tuple(command or ENGINE_COMMAND)
        self._child: EngineChild | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._questions: deque[asyncio.Future[Answer]] = deque()
        self._config: EngineConfig | None = None
        self._tokens_per_second: float | None = None
        self._swap: Swap | None = None  # until its engine is ready, or the one before is to be loaded again
        self._stopping = asyncio.Event()
        self._wakes = asyncio.Event()
        self._is_sleeping = False
        self._changed = asyncio.Event()

        self.state = EngineState.STARTING
        self.progress = 0.0
        self.detail = "starting"
        self.failure: PageddError | None = None
        self.info: EngineInfo | None = None
        self.stats: EngineStats | None = None
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
        self._send(Add(request=request))

    def abort(self, request_id: str, choice_index: int | None = None) -> None:
        """Ends a request, or one choice of it, before the engine's next step. No effect when there is no engine."""
        if self._child is not None and self.state is not EngineState.STOPPED:
            self._child.send(Abort(request_id=request_id, choice_index=choice_index))

    def set_priority(self, request_id: str, priority: int) -> None:
        """Moves a live request in the queue. Raises like `submit`."""
        self._send(SetPriority(request_id=request_id, priority=priority))

    def set_pace(self, tokens_per_second: float | None) -> None:
        """What this engine and every one after it may compute, prompt and output together; None is without a limit."""
        self._tokens_per_second = tokens_per_second
        if self.state in (EngineState.READY, EngineState.STALLED) and self._child is not None:
            self._child.send(SetPace(tokens_per_second=tokens_per_second))

    async def snapshot(self) -> EngineSnapshot:
        """Every block and sequence between two steps. Raises like `submit`, also when the engine dies meanwhile."""
        return (await self._ask(GetSnapshot(), Snapshot)).snapshot

    async def block(self, index: int) -> BlockInfo | None:
        """What `Engine.block` says. Raises like `snapshot`."""
        return (await self._ask(GetBlock(index), Block)).block

    async def prefixes(self, limit: int) -> PrefixTree:
        """What `Engine.prefixes` says. Raises like `snapshot`."""
        return (await self._ask(GetPrefixes(limit), Prefixes)).tree

    async def evict_prefix(self, digest: bytes) -> Eviction | None:
        """What `Engine.evict_prefix` says. Raises like `snapshot`."""
        return (await self._ask(EvictPrefix(digest), Evicted)).eviction

    async def _ask(self, question: Question, kind: type[_Answer]) -> _Answer:
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._send(question)
        # The engine answers in order, so the oldest future is always the next one to be answered.
        self._questions.append(future)
        answer = await future
        assert isinstance(answer, kind)
        return answer

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

    def _tell_to_exit(self) -> None:
        """The engine process ends, or hangs after `_EXIT_TIMEOUT_S`; with a disk tier it has `CLOSE_LIMIT_S` more."""
        if self._child is not None:
            has_disk_tier = self._config is not None and self._config.kv_disk_gib > 0
            self._child.tell_to_exit(_EXIT_TIMEOUT_S + (CLOSE_LIMIT_S if has_disk_tier else 0.0))

    # The life of engines

    async def _supervise(self, arguments: tuple[str, ...]) -> None:
        try:
            await self._keep_running(arguments)
        except PageddError as error:
            log.error("%s", error)
            self._forget_engine(Ended(error.message))
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
            self._forget_engine(ended)
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
        match message:
            case Idle() | LoadFailed():
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
                self._begin_loading()
            case Loading(fraction=fraction, what=what):
                self._enter(EngineState.LOADING, what, fraction)
            case Ready(info=info, stats=stats):
                self.info, self.stats = info, stats
                self._policy.serves()
                if self._swap is not None:
                    self._swap.is_done = True
                    self._swap = None
                if self._config is not None and not self.has_fallen_back:
                    # Measured once, not at every wake.
                    self._config = replace(self._config, kv_quality=info.kv_quality)
                self._is_sleeping = False
                self._enter(EngineState.READY, "", 1.0)
                if self._tokens_per_second is not None:
                    self.set_pace(self._tokens_per_second)

    def _begin_loading(self) -> None:
        """When both are there, the engine process and the order to load."""
        if self._config is not None and self._child is not None and self._child.has_said_hello:
            self._enter(EngineState.LOADING, "libraries")
            self._child.load(on_the_cpu(self._config) if self.has_fallen_back else self._config)

    def _send(self, message: ToEngine) -> None:
        self.check_ready()
        if self._child is None or not self._child.send(message):
            raise PageddError("engine_died", "the engine process has just ended; try again shortly")

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

    def _forget_engine(self, ended: Ended) -> None:
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
