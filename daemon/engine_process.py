"""The engine process: one loop around `Engine`, driven by the front over a private socket.

    python -P -m pagedd.daemon.engine_process --link ipc://… --parent PID

It owns the device and token ids; no text, no client. It ends with the front, whatever the front died of, and gives all
device memory back by ending. `engine_child.py` starts and watches it; `engine_link.py` has what is said.
"""

import argparse
import gc
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import zmq

from pagedd.daemon import fatal_trace, logs
from pagedd.daemon.engine_link import (
    CLOSE_LIMIT_S,
    IDLE_INTERVAL_S,
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
    SetPace,
    SetPriority,
    Snapshot,
    Start,
    StepDone,
    ToEngine,
    decode_to_engine,
    encode,
)
from pagedd.daemon.pace import Pace
from pagedd.daemon.parent import die_with_parent
from pagedd.engine.config import EngineConfig
from pagedd.engine.errors import EngineError
from pagedd.engine.info import EngineInfo
from pagedd.engine.kv.prefix_tree import PrefixTree
from pagedd.engine.request import Preemption, Request, SequenceOutput
from pagedd.engine.stats import BlockInfo, EngineSnapshot, EngineStats, Eviction

# Run with -m, this module is called __main__.
log = logging.getLogger("pagedd.daemon.engine_process")

LOAD_FAILED_STATUS = 3
CRASH_STATUS = 70

_LOADING_INTERVAL_S = 0.05
# How long a last message may take to leave before the process goes.
_FAREWELL_MS = 2000


class EngineLike(Protocol):
    """What the loop needs of `pagedd.engine.engine.Engine`; importing that would bring torch."""

    @property
    def has_work(self) -> bool: ...
    def add(self, request: Request) -> None: ...
    def abort(self, request_id: str, choice_index: int | None = None) -> bool: ...
    def set_priority(self, request_id: str, priority: int) -> bool: ...
    def pace(self, tokens_per_second: float | None) -> None: ...
    def step(self) -> list[SequenceOutput]: ...
    def stats(self) -> EngineStats: ...
    @property
    def preemptions(self) -> list[Preemption]: ...
    def snapshot(self) -> EngineSnapshot: ...
    def block(self, index: int) -> BlockInfo | None: ...
    def prefixes(self, limit: int) -> PrefixTree: ...
    def evict_prefix(self, digest: bytes) -> Eviction | None: ...
    def after_step(self) -> bool: ...
    @property
    def idle_work_due_s(self) -> float | None: ...
    def check_when_idle(self) -> bool: ...
    def close(self, limit_s: float) -> None: ...


# Settings and a progress callback to an engine and what it chose.
CreateEngine = Callable[[EngineConfig, Callable[[float, str], None]], tuple[EngineLike, EngineInfo]]


class LinkLost(Exception):
    """The front closed its end."""


class Link:
    """The engine's end of the socket to the front. One thread only: that is ZeroMQ's rule for a socket."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        # Never a second connection: a front that is gone does not come back at this address.
        self._socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self._socket.setsockopt(zmq.LINGER, _FAREWELL_MS)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(address)

    def send(self, message: FromEngine) -> None:
        """Waits while the front is far behind, which is how it holds the engine back. Raises `LinkLost`."""
        payload = encode(message)
        while True:
            try:
                return self._socket.send(payload, zmq.NOBLOCK)
            except zmq.Again:
                self._wait(zmq.POLLOUT)

    def receive(self, timeout_ms: int = -1) -> ToEngine | None:
        """The next message; None when there is none within `timeout_ms` (-1 waits for ever). Raises `LinkLost`."""
        if not self._wait(zmq.POLLIN, timeout_ms):
            return None
        return decode_to_engine(self._socket.recv(zmq.NOBLOCK))

    def _wait(self, event: int, timeout_ms: int = -1) -> bool:
        ready = dict(zmq.zmq_poll([(self._socket, event), (self._monitor, zmq.POLLIN)], timeout_ms))
        if ready.get(self._socket):
            return True
        if ready:
            raise LinkLost
        return False

    def close(self) -> None:
        self._socket.disable_monitor()
        self._context.destroy(linger=_FAREWELL_MS)


def serve(link: Link, engine: EngineLike, pace: Pace | None = None) -> None:
    """Steps the engine while it has work, and sleeps on the socket while it has none. Returns when told to exit."""
    pace = pace or Pace()
    while obey(link, engine, pace):
        has_saved = False
        if engine.has_work:
            pace.begin_step()
            outputs = engine.step()
            stats = engine.stats()
            pace.end_step(stats.num_scheduled_tokens)
            link.send(StepDone(outputs=outputs, stats=stats, preemptions=engine.preemptions))
            has_saved = engine.after_step()
        if not engine.has_work and (engine.check_when_idle() or has_saved):
            link.send(StepDone(outputs=[], stats=engine.stats()))


def obey(link: Link, engine: EngineLike, pace: Pace) -> bool:
    """Carries out every command that has arrived, so that an abort counts before the next step.

    Waits for one when there is no work, until there is some that is for idle times, and while `pace` has the next step
    wait. False: told to exit.
    """
    has_heard = changed = False

    def waits() -> bool:
        return pace.wait_s > 0 if engine.has_work else not has_heard and engine.idle_work_due_s != 0

    while True:
        message = link.receive(timeout_ms=_patience_ms(engine, pace) if waits() else 0)
        if message is None:
            if not waits():
                break
            link.send(Idle())
        elif isinstance(message, Exit):
            return False
        else:
            has_heard = True
            changed |= _carry_out(message, link, engine, pace)
    if changed and not engine.has_work:
        # No step will tell the front that an abort gave blocks back.
        link.send(StepDone(outputs=[], stats=engine.stats()))
    return True


def _patience_ms(engine: EngineLike, pace: Pace) -> int:
    """Until the engine has to do something by itself."""
    due_s = pace.wait_s if engine.has_work else engine.idle_work_due_s
    return math.ceil(1000 * (IDLE_INTERVAL_S if due_s is None else min(IDLE_INTERVAL_S, due_s)))


def _carry_out(message: ToEngine, link: Link, engine: EngineLike, pace: Pace) -> bool:
    """True when the engine's figures may have changed."""
    match message:
        case Add(request=request):
            try:
                engine.add(request)
            except EngineError as error:
                link.send(Refused(request_id=request.request_id, code=error.code, message=error.message))
        case Abort(request_id=request_id, choice_index=choice_index):
            engine.abort(request_id, choice_index)
        case SetPriority(request_id=request_id, priority=priority):
            engine.set_priority(request_id, priority)
        case SetPace(tokens_per_second=tokens_per_second):
            pace.tokens_per_second = tokens_per_second
            engine.pace(tokens_per_second)
        case GetSnapshot() | GetBlock() | GetPrefixes() | EvictPrefix():
            link.send(_answer(message, engine))
            return isinstance(message, EvictPrefix)
        case _:
            raise ValueError(f"unexpected message on the link: {type(message).__name__}")
    return True


def _answer(question: Question, engine: EngineLike) -> Answer:
    match question:
        case GetSnapshot():
            return Snapshot(snapshot=engine.snapshot())
        case GetBlock(index=index):
            return Block(block=engine.block(index))
        case GetPrefixes(limit=limit):
            return Prefixes(tree=engine.prefixes(limit))
        case EvictPrefix(digest=digest):
            return Evicted(eviction=engine.evict_prefix(digest))


class LoadProgress:
    """Passes the load's progress on, seldom enough to cost nothing, and notices an order to exit meanwhile."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._sent_s = 0.0
        self._what = ""

    def __call__(self, fraction: float, what: str) -> None:
        now = time.monotonic()
        if what == self._what and now - self._sent_s < _LOADING_INTERVAL_S:
            return
        self._sent_s, self._what = now, what
        self._link.send(Loading(fraction=fraction, what=what))
        if isinstance(self._link.receive(timeout_ms=0), Exit):
            raise LinkLost


def import_engine() -> CreateEngine:
    """Imports torch and all that the engine needs, which takes seconds."""
    from pagedd.engine.create import create_engine

    return create_engine


def run(
    link: Link,
    import_engine: Callable[[], CreateEngine] = import_engine,
    keep_trace: Callable[[BaseException], None] = lambda error: None,
) -> int:
    """The life of the process once it is connected; the exit status. `keep_trace` hears what it dies of."""
    link.send(Hello(pid=os.getpid()))
    try:
        # The front may still be looking for the model.
        create_engine = import_engine()
        start = link.receive()
        if not isinstance(start, Start):
            return 0
        engine, info = create_engine(start.config, LoadProgress(link))
    except EngineError as error:
        log.error("the engine cannot start: %s", error)
        return _report_failure(link, error.code, error.message, LOAD_FAILED_STATUS)
    except MemoryError:
        log.exception("out of host memory while loading")
        return _report_failure(link, "out_of_memory", "the host's memory ran out while the model loaded", CRASH_STATUS)
    except LinkLost:
        return 0
    except Exception as error:
        log.exception("fault while loading")
        return _report_failure(link, "internal", f"{type(error).__name__}: {error}", CRASH_STATUS)
    # What loading left is here to stay. Walking it again in every full collection would hold a step up.
    gc.collect()
    gc.freeze()
    link.send(Ready(info=info, stats=engine.stats()))
    try:
        serve(link, engine)
        engine.close(CLOSE_LIMIT_S)
    except LinkLost:
        log.warning("the front closed the link; the engine ends")
    except Exception as error:
        log.exception("fault in the engine; the front will start a new one")
        keep_trace(error)
        return CRASH_STATUS
    return 0


def _report_failure(link: Link, code: str, message: str, status: int) -> int:
    link.send(LoadFailed(code=code, message=message))
    # The front answers with Exit: its reason is there before the exit status is.
    link.receive(timeout_ms=_FAREWELL_MS)
    return status


def main(argv: list[str] | None = None, import_engine: Callable[[], CreateEngine] = import_engine) -> int:
    parser = argparse.ArgumentParser(description="Started by pagedd; not a command for people.")
    parser.add_argument("--link", required=True)
    parser.add_argument("--parent", required=True, type=int)
    parser.add_argument("--trace", type=Path, help="file for where it died")
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--log-format", default="auto")
    options = parser.parse_args(argv)
    # Before anything slow, so that no front's death goes unseen.
    die_with_parent(options.parent)
    # Ctrl-C, a terminal that closes and `systemctl stop` reach every process; the front decides when the engine has
    # finished its requests. The kernel also hangs up a group with a stopped process when the last parent outside goes.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logs.setup(options.log_level, options.log_format)
    keep_trace = fatal_trace.arm(options.trace)
    link = Link(options.link)
    try:
        return run(link, import_engine, keep_trace)
    finally:
        link.close()


if __name__ == "__main__":
    sys.exit(main())
