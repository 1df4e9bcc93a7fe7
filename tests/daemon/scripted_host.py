"""An engine's host without an engine: it answers what a test says, a token each time the loop comes round."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pagedd.client.errors import PageddError
from pagedd.daemon.engine_state import EngineState
from pagedd.engine.config import EngineConfig
from pagedd.engine.info import EngineInfo
from pagedd.engine.kv.prefix_tree import PrefixTree
from pagedd.engine.request import Preemption, Request, SequenceOutput, TokenLogprobs
from pagedd.engine.stats import BlockInfo, EngineSnapshot, EngineStats, Eviction, SequenceSnapshot

from .byte_model import CONTEXT, VOCAB_SIZE


def engine_info(**changes: Any) -> EngineInfo:
    facts: dict[str, Any] = {
        "device": "cpu",
        "device_name": "scripted",
        "dtype": "float32",
        "kv_cache_dtype": "float32",
        "kernel_backend": "none",
        "vocab_size": VOCAB_SIZE,
        "max_model_len": CONTEXT,
        "max_request_tokens": CONTEXT,
        "block_size": 16,
        "num_blocks": 256,
        "kv_bytes_per_token": 8,
        "kv_open_bytes": 0,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "model_bytes": 0,
        "load_seconds": 0.0,
    }
    return EngineInfo(**(facts | changes))


def engine_stats(**changes: Any) -> EngineStats:
    facts: dict[str, Any] = {
        "num_blocks": 256,
        "block_size": 16,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": CONTEXT,
        "num_blocks_free": 256,
    }
    return EngineStats(**(facts | changes))


@dataclass
class ScriptedHost:
    """Stands in for `EngineHost`. `reply` gives the ids of an answer; None leaves a request for `produce`.

    Answers come one token a step, a step each time the event loop comes round, until they or `max_tokens` end.
    """

    reply: Callable[[Request], list[int] | None] = lambda request: list(b"Hello world")
    trace: str = ""
    state: EngineState = EngineState.READY
    progress: float = 1.0
    detail: str = ""
    info: EngineInfo | None = field(default_factory=engine_info)
    stats: EngineStats | None = field(default_factory=engine_stats)
    has_fallen_back: bool = False
    num_cached_tokens: int = 0
    submitted: list[Request] = field(default_factory=list)
    aborted: list[tuple[str, int | None]] = field(default_factory=list)
    priorities: list[tuple[str, int]] = field(default_factory=list)
    live: dict[str, Request] = field(default_factory=dict)
    num_restarts: int = 0
    blocks: dict[int, BlockInfo] = field(default_factory=dict)
    tree: PrefixTree = field(default_factory=lambda: PrefixTree(runs=[], num_blocks=0, is_cut=False))
    evicted: list[bytes] = field(default_factory=list)
    num_left_on_disk: int = 0
    on_preempted: Callable[[list[Preemption]], None] = lambda preemptions: None
    on_outputs: Callable[[list[SequenceOutput]], None] = lambda outputs: None
    on_refused: Callable[[str, str, str], None] = lambda request_id, code, message: None
    on_lost: Callable[[str], None] = lambda reason: None
    on_ended: Callable[[], None] = lambda: None
    on_state: Callable[[], None] = lambda: None
    is_sleeping: bool = False
    num_wakes: int = 0
    swapped: list[EngineConfig] = field(default_factory=list)
    swap_failure: PageddError | None = None
    exit_gate: asyncio.Event = field(default_factory=asyncio.Event)  # gates are closed by a test that clears them
    load_gate: asyncio.Event = field(default_factory=asyncio.Event)
    step_s: float = 0.0
    _tasks: set["asyncio.Task[None]"] = field(default_factory=set)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.exit_gate.set()
        self.load_gate.set()

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        if name in ("state", "is_sleeping") and (changed := getattr(self, "_changed", None)) is not None:
            changed.set()
            changed.clear()
            self.on_state()

    def begin_sleep(self) -> None:
        self.check_ready()
        self.is_sleeping = True

    async def sleep(self) -> None:
        if self.state is not EngineState.ASLEEP:
            self._end()
            self.state, self.detail = EngineState.ASLEEP, "a request wakes it"

    async def swap(self, config: EngineConfig, take_over: Callable[[], None], take_back: Callable[[], None]) -> None:
        """The engine ends while `exit_gate` is open and the next one loads while `load_gate` is, or cannot, as
        `swap_failure` says.
        """
        self.is_sleeping = True
        await self.exit_gate.wait()
        self._end()
        self.state = EngineState.ASLEEP
        take_over()
        self.swapped.append(config)
        await self._load()
        if self.swap_failure is not None:
            take_back()
            await self._load()
        self.get_up()
        await asyncio.sleep(0.01)  # whoever waits for an engine may be faster than whoever asked for it
        if self.swap_failure is not None:
            raise self.swap_failure

    async def _load(self) -> None:
        for state in (EngineState.STARTING, EngineState.LOADING):
            self.state = state
            await asyncio.sleep(0)
        await self.load_gate.wait()

    def _end(self) -> None:
        if self.info is not None:
            self.on_ended()
        self.live.clear()
        self.info = self.stats = None

    def wake(self) -> None:
        """A test says when it is awake: `get_up`."""
        self.num_wakes += 1
        if self.state is EngineState.ASLEEP:
            self.state = EngineState.LOADING

    def get_up(self) -> None:
        self.info, self.stats, self.is_sleeping = engine_info(), engine_stats(), False
        self.state = EngineState.READY

    async def wait_changed(self) -> None:
        await self._changed.wait()

    def check_ready(self) -> None:
        codes = {
            EngineState.STARTING: "engine_loading",
            EngineState.LOADING: "engine_loading",
            EngineState.RESTARTING: "engine_died",
            EngineState.STALLED: "engine_stalled",
            EngineState.ASLEEP: "engine_asleep",
            EngineState.FAILED: "engine_failed",
            EngineState.STOPPED: "shutting_down",
        }
        if self.state in codes:
            raise PageddError(codes[self.state], self.describe())

    def describe(self) -> str:
        if self.state is EngineState.LOADING:
            return f"loading, {round(self.progress * 100)} % ({self.detail})"
        return self.state.value

    def submit(self, request: Request) -> None:
        self.check_ready()
        self.submitted.append(request)
        self.live[request.request_id] = request
        ids = self.reply(request)
        if ids is not None:
            task = asyncio.get_running_loop().create_task(self._play(request, ids))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def abort(self, request_id: str, choice_index: int | None = None) -> None:
        self.aborted.append((request_id, choice_index))
        if choice_index is None:
            self.live.pop(request_id, None)

    def set_priority(self, request_id: str, priority: int) -> None:
        self.priorities.append((request_id, priority))

    async def snapshot(self) -> EngineSnapshot:
        self.check_ready()
        assert self.stats is not None
        sequences = [
            SequenceSnapshot(
                request_id=request.request_id,
                choice_index=index,
                state="decode",
                priority=request.priority,
                num_prompt_tokens=len(request.prompt_token_ids),
                num_cached_tokens=0,
                num_computed_tokens=len(request.prompt_token_ids),
                num_output_tokens=1,
                num_preemptions=0,
                age_s=0.5,
                first_token_s=0.25,
                block_table=[7, 8],
            )
            for request in self.live.values()
            for index in range(request.params.n)
        ]
        num_blocks = self.stats.num_blocks
        return EngineSnapshot(
            stats=self.stats, block_states=bytes(num_blocks), block_ref_counts=bytes(num_blocks), sequences=sequences
        )

    async def block(self, index: int) -> BlockInfo | None:
        """One of `blocks`."""
        self.check_ready()
        return self.blocks.get(index)

    async def prefixes(self, limit: int) -> PrefixTree:
        self.check_ready()
        return self.tree

    async def evict_prefix(self, digest: bytes) -> Eviction | None:
        """Frees the runs of `tree` that have that digest."""
        self.check_ready()
        self.evicted.append(digest)
        found = [run for run in self.tree.runs if run.digest == digest]
        num_beside = 2 if self.num_left_on_disk else 0
        return Eviction(sum(run.num_blocks for run in found), 0, self.num_left_on_disk, num_beside) if found else None

    def produce(self, request_id: str, ids: list[int] | bytes, index: int = 0, **fields: Any) -> None:
        """One step with `ids` for one choice."""
        output = SequenceOutput(request_id=request_id, choice_index=index, token_ids=list(ids), **fields)
        if output.finish_reason is not None:
            request = self.live[request_id]
            if request.params.n == 1:
                del self.live[request_id]
        self.on_outputs([output])

    def lose(self, reason: str = "the engine process was ended by SIGKILL") -> None:
        """The engine process dies, and another one starts."""
        self.live.clear()
        self.on_lost(reason)
        self.state, self.detail, self.info, self.stats = EngineState.RESTARTING, reason, None, None

    async def _play(self, request: Request, ids: list[int]) -> None:
        params = request.params
        for position in range(min(len(ids), params.max_tokens)):
            await asyncio.sleep(self.step_s)
            if request.request_id not in self.live:
                return
            token_id = ids[position]
            reason = None
            if token_id in params.stop_token_ids:
                reason = "stop"
            elif position + 1 == min(len(ids), params.max_tokens):
                reason = "length"
            if reason is not None:
                del self.live[request.request_id]
            logprobs = None
            if params.num_logprobs is not None:
                top = [(token_id + i, -0.5 - i) for i in range(params.num_logprobs)]
                logprobs = [TokenLogprobs(logprob=-0.5, top=top)]
            if self.stats is not None:
                self.stats.steps_total += 1
                self.stats.num_scheduled_tokens = params.n
            self.on_outputs(
                [
                    SequenceOutput(
                        request_id=request.request_id,
                        choice_index=index,
                        token_ids=[token_id],
                        logprobs=logprobs,
                        finish_reason=reason,
                        stop_token_id=token_id if reason == "stop" else None,
                        num_cached_tokens=self.num_cached_tokens,
                        queue_s=0.0 if position == 0 else None,
                    )
                    for index in range(params.n)
                ]
            )
            if reason is not None:
                return
