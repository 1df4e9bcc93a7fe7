"""What the front and the engine process say to each other, over one private `ipc://` PAIR socket, msgpack.

The engine process sends `Hello` when it is up; the front answers `Start` once it knows what to load; `Loading` follows
until `Ready` or `LoadFailed`, which the front answers with `Exit`.
From then on the front sends `Add`, `Abort`, … at any time and the engine sends one `StepDone` per step, and `Idle` now
and then while there is none. Questions (`Get…`, `EvictPrefix`) are answered in the order in which they came, between
two steps.
No torch on this side of the import graph: only the engine's torch-free modules.
"""

from typing import Any

import msgspec

from pagedd.engine.config import EngineConfig
from pagedd.engine.info import EngineInfo
from pagedd.engine.kv.prefix_tree import PrefixTree
from pagedd.engine.request import Preemption, Request, SequenceOutput
from pagedd.engine.stats import BlockInfo, EngineSnapshot, EngineStats, Eviction

# How long an engine that is told to exit may bring blocks to the disk, where there is a disk tier.
CLOSE_LIMIT_S = 5.0


class Start(msgspec.Struct, tag="start"):
    config: EngineConfig


class Add(msgspec.Struct, tag="add"):
    request: Request


class Abort(msgspec.Struct, tag="abort"):
    """Ends a request, or one choice of it. No answer: the front has ended it already. Unknown ids are ignored."""

    request_id: str
    choice_index: int | None = None


class SetPriority(msgspec.Struct, tag="set_priority"):
    request_id: str
    priority: int


class SetPace(msgspec.Struct, tag="set_pace"):
    """Compute no more tokens a second from now on, prompt and output together; None is as many as it can."""

    tokens_per_second: float | None


class GetSnapshot(msgspec.Struct, tag="get_snapshot"):
    pass


class GetBlock(msgspec.Struct, tag="get_block"):
    index: int


class GetPrefixes(msgspec.Struct, tag="get_prefixes"):
    limit: int


class EvictPrefix(msgspec.Struct, tag="evict_prefix"):
    digest: bytes


class Exit(msgspec.Struct, tag="exit"):
    pass


Question = GetSnapshot | GetBlock | GetPrefixes | EvictPrefix
ToEngine = Start | Add | Abort | SetPriority | SetPace | Question | Exit


class Hello(msgspec.Struct, tag="hello"):
    pid: int


class Loading(msgspec.Struct, tag="loading"):
    """`fraction` is 0–1 of the whole load; `what` names the part, for people."""

    fraction: float
    what: str


class Ready(msgspec.Struct, tag="ready"):
    info: EngineInfo
    stats: EngineStats


class LoadFailed(msgspec.Struct, tag="load_failed"):
    code: str
    message: str


class StepDone(msgspec.Struct, tag="step"):
    outputs: list[SequenceOutput]
    stats: EngineStats
    preemptions: list[Preemption] = []


# The front ends an engine that says nothing for long (`engine_watch.py`).
IDLE_INTERVAL_S = 1.0


class Idle(msgspec.Struct, tag="idle"):
    """There is no work, and the loop is alive."""


class Refused(msgspec.Struct, tag="refused"):
    """The engine would not take an `Add`; the request has no other message."""

    request_id: str
    code: str
    message: str


class Snapshot(msgspec.Struct, tag="snapshot"):
    snapshot: EngineSnapshot


class Block(msgspec.Struct, tag="block"):
    """None beyond the pool."""

    block: BlockInfo | None


class Prefixes(msgspec.Struct, tag="prefixes"):
    tree: PrefixTree


class Evicted(msgspec.Struct, tag="evicted"):
    """None when nothing has that digest."""

    eviction: Eviction | None


Answer = Snapshot | Block | Prefixes | Evicted
FromEngine = Hello | Loading | Ready | LoadFailed | StepDone | Idle | Refused | Answer

_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    return _encoder.encode(message)


def decode_to_engine(payload: bytes) -> ToEngine:
    message: ToEngine = _to_engine.decode(payload)
    return message


def decode_from_engine(payload: bytes) -> FromEngine:
    message: FromEngine = _from_engine.decode(payload)
    return message
