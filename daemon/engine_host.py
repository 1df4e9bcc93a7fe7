"""The engine as the rest of the front sees it, whichever process it is: what it is told and asked, and what it says.

`Service` calls `submit`, `abort`, `set_priority` and asks, and sets the callbacks; `server.py` starts and stops. When
processes start and end is `engine_lives.py`'s. Knows no requests: when the engine dies `on_lost` tells their owner.
One event loop, no thread; every callback runs in the loop. No torch.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from pagedd.client.errors import PageddError
from pagedd.daemon.engine_child import Ended
from pagedd.daemon.engine_link import (
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
    Prefixes,
    Question,
    Ready,
    Refused,
    SetPace,
    SetPriority,
    Snapshot,
    StepDone,
)
from pagedd.daemon.engine_lives import EngineLives
from pagedd.daemon.engine_state import EngineState
from pagedd.daemon.engine_watch import SilenceLimits
from pagedd.daemon.restart_policy import RestartPolicy
from pagedd.engine.info import EngineInfo
from pagedd.engine.kv.prefix_tree import PrefixTree
from pagedd.engine.request import Preemption, Request, SequenceOutput
from pagedd.engine.stats import BlockInfo, EngineSnapshot, EngineStats, Eviction

log = logging.getLogger(__name__)

_Answer = TypeVar("_Answer", Snapshot, Block, Prefixes, Evicted)


class EngineHost(EngineLives):
    """`on_lost` tells of an engine that died, `on_ended` of one that ended as it was told.

    Attributes:
        info: what the engine chose, once it is ready; None while there is none.
        stats: the newest figures; None while there is no engine.
        on_preempted, on_outputs, on_refused, on_lost, on_ended: set by `Service`.
    """

    def __init__(
        self,
        socket_path: Path,
        command: Sequence[str] | None = None,
        policy: RestartPolicy | None = None,
        silence: SilenceLimits | None = None,
    ) -> None:
        """As `EngineLives`."""
        super().__init__(socket_path, command, policy, silence)
        self._questions: deque[asyncio.Future[Answer]] = deque()
        self._tokens_per_second: float | None = None

        self.info: EngineInfo | None = None
        self.stats: EngineStats | None = None
        self.on_preempted: Callable[[list[Preemption]], None] = lambda preemptions: None
        self.on_outputs: Callable[[list[SequenceOutput]], None] = lambda outputs: None
        self.on_refused: Callable[[str, str, str], None] = lambda request_id, code, message: None
        self.on_lost: Callable[[str], None] = lambda reason: None
        self.on_ended: Callable[[], None] = lambda: None

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

    def _hear(self, message: FromEngine) -> None:
        match message:
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
            case Ready(info=info, stats=stats):
                self.info, self.stats = info, stats
                if self._tokens_per_second is not None and self._child is not None:
                    self._child.send(SetPace(tokens_per_second=self._tokens_per_second))

    def _lose(self, ended: Ended) -> None:
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
