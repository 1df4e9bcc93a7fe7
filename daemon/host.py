"""What the service needs of the engine's host: `engine_host.EngineHost`, or a scripted one in tests."""

from collections.abc import Callable
from typing import Protocol

from pagedd.daemon.engine_host import EngineState
from pagedd.engine.info import EngineInfo
from pagedd.engine.kv.prefix_tree import PrefixTree
from pagedd.engine.request import Preemption, Request, SequenceOutput
from pagedd.engine.stats import BlockInfo, EngineSnapshot, EngineStats


class Host(Protocol):
    """State and figures of the engine, what it may be told, and who is told when something happens."""

    state: EngineState
    progress: float
    detail: str
    trace: str
    info: EngineInfo | None
    stats: EngineStats | None
    on_preempted: Callable[[list[Preemption]], None]
    on_outputs: Callable[[list[SequenceOutput]], None]
    on_refused: Callable[[str, str, str], None]
    on_lost: Callable[[str], None]
    on_state: Callable[[], None]

    @property
    def has_fallen_back(self) -> bool: ...
    def check_ready(self) -> None: ...
    def describe(self) -> str: ...
    def submit(self, request: Request) -> None: ...
    def abort(self, request_id: str, choice_index: int | None = None) -> None: ...
    def set_priority(self, request_id: str, priority: int) -> None: ...
    async def snapshot(self) -> EngineSnapshot: ...
    async def block(self, index: int) -> BlockInfo | None: ...
    async def prefixes(self, limit: int) -> PrefixTree: ...
    async def evict_prefix(self, digest: bytes) -> tuple[int, int] | None: ...
