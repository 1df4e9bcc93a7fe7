"""A daemon that only speaks: a real ROUTER and PUB in a thread, which says what a test tells it to."""

import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import zmq

from pagedd.client import protocol
from pagedd.client.endpoints import Endpoints, ipc
from pagedd.client.protocol import (
    Accepted,
    Cancel,
    Chat,
    Choice,
    ClientMessage,
    DaemonMessage,
    Delta,
    Done,
    Generate,
    Load,
    Ok,
    Ping,
    Pong,
    SetPriority,
    Sleep,
    Usage,
    Wake,
)
from pagedd.client.questions import (
    BlockDetail,
    Evicted,
    EvictPrefix,
    GetBlock,
    GetPrefixes,
    GetPreviews,
    GetStats,
    GetText,
    GetUsage,
    Prefixes,
    PrefixNode,
    Previews,
    RequestText,
    Stats,
    UsageReport,
)
from pagedd.client.stats_frame import BlockMap, RequestRow, StatsFrame
from pagedd.client.usage import CallerUsage, Cost

WAIT_S = 60.0
M = TypeVar("M", bound=ClientMessage)


class FakeDaemon:
    """Answers like a daemon whose model says the words of `words`. `answer` may be replaced by a test.

    Attributes:
        heard: every message that came, by socket name (`requests` or `admin`), in order.
        answer: what is said back to each message.
    """

    def __init__(self, directory: Path) -> None:
        self.endpoints = Endpoints(directory)
        self.words = ["one", " two", " three"]
        self.answer: Callable[[ClientMessage], list[DaemonMessage]] = self.default_answer
        self.heard: queue.Queue[tuple[str, ClientMessage]] = queue.Queue()
        self.frame = make_frame()
        self._outbox: queue.Queue[DaemonMessage | bytes] = queue.Queue()
        self._published: queue.Queue[StatsFrame | bytes] = queue.Queue()
        self._is_stopping = False
        self._is_bound = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._is_bound.wait(WAIT_S)

    def say(self, message: DaemonMessage | bytes) -> None:
        """Says something unasked to whoever spoke last; bytes go out as they are, after the protocol's version."""
        self._outbox.put(message)

    def publish(self, frame: StatsFrame | bytes) -> None:
        self._published.put(frame)

    def hear(self, kind: type[M], socket: str = "requests") -> M:
        """The next message of this kind, dropping others. Fails after a minute."""
        while True:
            where, message = self.heard.get(timeout=WAIT_S)
            assert message.id, f"the daemon refuses {message}: it has no id"
            if isinstance(message, kind) and where == socket:
                return message

    def has_published(self) -> bool:
        return self._published.empty()

    def stop(self) -> None:
        self._is_stopping = True
        self._thread.join()

    def default_answer(self, message: ClientMessage) -> list[DaemonMessage]:
        match message:
            case Generate() | Chat():
                deltas = [Delta(id=message.id, text=word, token_ids=[i]) for i, word in enumerate(self.words)]
                return [
                    Accepted(id=message.id, request_id="r1"),
                    *(deltas if message.stream else []),
                    make_done(message.id, "".join(self.words)),
                ]
            case Ping():
                return [Pong(id=message.id, version="0.1.0", state="ready")]
            case GetStats():
                return [Stats(id=message.id, frame=self.frame)]
            case GetBlock():
                return [BlockDetail(id=message.id, index=message.index, state="cached", num_tokens=4, text="once")]
            case GetPrefixes():
                node = PrefixNode(digest="d1", parent="", depth=0, num_tokens=8, num_blocks=2, user="ana")
                return [Prefixes(id=message.id, nodes=[node][: message.limit], num_blocks=2)]
            case GetUsage():
                return [make_usage(message.id)]
            case EvictPrefix():
                left, beside = (3, 2) if message.digest == "stuck" else (0, 0)
                return [Evicted(id=message.id, num_blocks=2, num_left_on_disk=left, num_beside_on_disk=beside)]
            case GetPreviews():
                return [Previews(id=message.id, previews={"r1": "once"})]
            case GetText():
                return [
                    RequestText(id=message.id, request_id=message.target, prompt="once", outputs=["".join(self.words)])
                ]
            case Cancel() | SetPriority() | Sleep() | Wake() | Load():
                return [Ok(id=message.id)]

    def _run(self) -> None:
        context = zmq.Context()
        sockets = {name: context.socket(zmq.ROUTER) for name in ("requests", "admin")}
        publisher = context.socket(zmq.PUB)
        sockets["requests"].bind(ipc(self.endpoints.requests))
        sockets["admin"].bind(ipc(self.endpoints.admin))
        publisher.bind(ipc(self.endpoints.stats))
        self._is_bound.set()
        speaker = b""
        while not self._is_stopping:
            for name, socket in sockets.items():
                while socket.poll(1):
                    speaker, version, payload = socket.recv_multipart()
                    assert version == protocol.PROTOCOL_VERSION
                    message = protocol.decode_client(payload)
                    self.heard.put((name, message))
                    for reply in self.answer(message):
                        socket.send_multipart([speaker, protocol.PROTOCOL_VERSION, protocol.encode(reply)])
            while not self._outbox.empty():
                said = self._outbox.get()
                payload = said if isinstance(said, bytes) else protocol.encode(said)
                sockets["requests"].send_multipart([speaker, protocol.PROTOCOL_VERSION, payload])
            while not self._published.empty():
                frame = self._published.get()
                publisher.send(frame if isinstance(frame, bytes) else protocol.encode(frame))
        context.destroy(linger=0)


def make_done(id: str, text: str, finish_reason: str = "stop") -> Done:
    return Done(
        id=id,
        request_id="r1",
        model="tiny",
        choices=[Choice(index=0, text=text, token_ids=[0, 1, 2], finish_reason=finish_reason)],
        usage=Usage(prompt_tokens=5, completion_tokens=3),
    )


def make_usage(id: str = "u") -> UsageReport:
    """Ana and a key, with a stated wattage and both prices; the key was not here in the last minute."""
    total = Cost(
        seconds=600.0,
        prompt_tokens=300,
        cached_tokens=100,
        output_tokens=60,
        joules=90.0,
        joules_per_token=0.25,
        joules_per_prompt_token=0.1,
        joules_per_output_token=1.0,
        money=0.003,
        money_per_million_prompt_tokens=1.5,
        money_per_million_output_tokens=12.25,
    )
    ana = CallerUsage(
        caller="ana",
        num_requests=4,
        num_in_flight=1,
        num_tokens_in_flight=50,
        refusals={"tokens": 2, "requests": 1},
        last_minute=total,
        since_start=total,
        max_requests=2,
        tokens_per_minute=600,
        tokens_left=250.5,
    )
    idle = Cost(seconds=60.0)
    key = CallerUsage(
        caller="key laptop",
        num_requests=1,
        num_in_flight=0,
        num_tokens_in_flight=0,
        refusals={},
        last_minute=idle,
        since_start=idle,
    )
    return UsageReport(
        id=id,
        callers=[ana, key],
        last_minute=idle,
        since_start=total,
        energy_source="stated",
        has_box_price=True,
        has_kwh_price=True,
        idle_joules=1000.0,
    )


def make_frame(**changes: object) -> StatsFrame:
    """Two sequences that share block 1, on a pool of eight blocks of four tokens: 3 used, 2 cached, 3 free."""
    row = {"user": "ana", "num_preemptions": 0}
    fields: dict[str, object] = {
        "version": "0.1.0",
        "time_s": 1000.0,
        "uptime_s": 61.0,
        "state": "ready",
        "detail": "",
        "model": "tiny",
        "device": "cpu",
        "dtype": "float32",
        "kv_cache_dtype": "float32",
        "figures": {"kv_usage": 0.5, "hit_rate": None, "num_requests_running": 2.0, "num_requests_waiting": 1.0},
        "requests": [
            RequestRow(
                request_id="r1",
                index=0,
                state="decode",
                priority=0,
                num_prompt_tokens=6,
                num_cached_tokens=4,
                num_computed_tokens=8,
                num_output_tokens=2,
                num_blocks=2,
                age_s=2.94,
                first_token_s=0.062,
                block_table=[1, 0],
                **row,
            ),
            RequestRow(
                request_id="r2",
                index=0,
                state="prefill",
                priority=-10,
                num_prompt_tokens=4096,
                num_cached_tokens=4,
                num_computed_tokens=8,
                num_output_tokens=0,
                num_blocks=2,
                age_s=0.4,
                first_token_s=None,
                block_table=[1, 4],
                **row,
            ),
            RequestRow(
                request_id="r3",
                index=0,
                state="waiting",
                priority=20,
                num_prompt_tokens=96,
                num_cached_tokens=0,
                num_computed_tokens=0,
                num_output_tokens=0,
                num_blocks=0,
                age_s=0.8,
                first_token_s=None,
                **row,
            ),
        ],
        "blocks": BlockMap(
            block_size=4, states=bytes([2, 2, 0, 1, 2, 1, 0, 0]), ref_counts=bytes([1, 2, 0, 0, 1, 0, 0, 0])
        ),
    }
    return StatsFrame(**{**fields, **changes})  # type: ignore[arg-type]
