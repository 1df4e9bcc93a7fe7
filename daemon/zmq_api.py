"""The ZeroMQ API: `pagedd.sock` for everyone in the group, `admin.sock` for the owner, `stats.sock` to watch.

Owns what each message does and who may send it. Connections are `zmq_server.py`'s, the messages
`pagedd.client.protocol`'s, and the work is done by `service.py`. Every message that can be answered is answered.
"""

import asyncio
import logging
from collections.abc import Coroutine
from pathlib import Path

import msgspec

from pagedd.client.endpoints import Endpoints
from pagedd.client.errors import PageddError
from pagedd.client.protocol import (
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    Cancel,
    Chat,
    ClientMessage,
    DaemonMessage,
    Done,
    Failed,
    Generate,
    Load,
    Ok,
    Ping,
    Pong,
    SetPriority,
    Sleep,
    Wake,
    decode_client,
    encode,
)
from pagedd.client.questions import EvictPrefix, GetBlock, GetPrefixes, GetPreviews, GetStats, GetText, GetUsage
from pagedd.daemon.activation import Inherited
from pagedd.daemon.caller import Caller
from pagedd.daemon.frames import VERSION
from pagedd.daemon.inspection import Inspection
from pagedd.daemon.limits import Limit
from pagedd.daemon.openai_schema import decoding_error
from pagedd.daemon.runtime_dir import ADMIN_MODE, REQUESTS_MODE
from pagedd.daemon.service import Service
from pagedd.daemon.stats_feed import StatsFeed
from pagedd.daemon.zmq_server import MAX_BACKLOG_BYTES, MAX_HELD_BYTES, Handler, HeldBytes, Peer, Server
from pagedd.daemon.zmtp import SocketKind

log = logging.getLogger(__name__)

ID_MAX_CHARS = 128
ID = Limit("id", "Chosen by the client, unique among its live requests.", max_chars=ID_MAX_CHARS)
# Two frames are a message, and a few more are refused in words.
KIND = SocketKind(
    b"ROUTER",
    peers=frozenset({b"DEALER", b"REQ", b"ROUTER"}),
    max_message_bytes=len(PROTOCOL_VERSION) + MAX_MESSAGE_BYTES,
    max_frames=8,
)
# How long the last messages may take to leave when the daemon stops.
_LINGER_S = 1.0
_MAX_QUESTIONS_UNDER_WAY = 64


class ZmqApi:
    """Serves `service` on the three ZeroMQ sockets of `endpoints`."""

    def __init__(self, service: Service, endpoints: Endpoints, inherited: Inherited | None = None) -> None:
        self._service = service
        self._endpoints = endpoints
        self._inherited = inherited or {}
        self._doors: list[_Door] = []
        self._feed: StatsFeed | None = None

    async def start(self) -> None:
        """Binds and serves. Raises `OSError` when an address is taken."""
        inspection, held = Inspection(self._service), HeldBytes(MAX_HELD_BYTES)
        for door, path, mode in (
            (_RequestsDoor, self._endpoints.requests, REQUESTS_MODE),
            (_AdminDoor, self._endpoints.admin, ADMIN_MODE),
        ):
            self._doors.append(door(self._service, inspection, path, held))
            await self._doors[-1].start(mode, self._inherited)
        self._feed = StatsFeed(self._service, self._endpoints.stats, held)
        await self._feed.start(self._inherited)

    async def close(self) -> None:
        """Lets the last messages leave for a moment and closes. Clients that do not read cannot delay it further."""
        if self._feed is not None:
            await self._feed.close()
        await asyncio.gather(*(door.close() for door in self._doors))
        self._doors.clear()
        self._feed = None


class _Door(Handler):
    """What both sockets for messages do: answer the ones that are no requests, refuse what is wrong."""

    def __init__(self, service: Service, inspection: Inspection, path: Path, held: HeldBytes) -> None:
        self._service = service
        self._inspection = inspection
        self._questions: set[asyncio.Task[None]] = set()
        # Of each peer that has any, the live requests: its own id -> the daemon's.
        self._live: dict[Peer, dict[str, str]] = {}
        self._server = Server(KIND, path, self, held)

    async def start(self, mode: int, inherited: Inherited) -> None:
        """Raises `OSError`."""
        await self._server.start(mode, inherited)

    async def close(self) -> None:
        questions = list(self._questions)
        for task in questions:
            task.cancel()
        await asyncio.gather(*questions, return_exceptions=True)
        await self._server.close(_LINGER_S)

    def _handle(self, peer: Peer, caller: Caller, message: ClientMessage) -> None:
        """What is particular to a socket. Raises `PageddError`, which is sent back."""
        raise NotImplementedError

    def on_message(self, peer: Peer, frames: list[bytes]) -> None:
        message_id = ""
        try:
            if len(frames) != 2:
                raise PageddError("malformed_message", f"{len(frames)} frames; send two, version and message")
            version, payload = frames
            if version != PROTOCOL_VERSION:
                spoken = PROTOCOL_VERSION.decode()
                raise PageddError("protocol_version", f"{version[:32]!r}; this daemon speaks {spoken}")
            message_id = id_of(payload)
            message = decode_message(payload)
            ID.check(message.id)
            match message:
                case Ping():
                    self._send(peer, Pong(id=message.id, version=VERSION, state=self._service.state))
                case GetStats() | GetBlock() | GetPrefixes() | GetText() | GetPreviews() | GetUsage():
                    self._answer_later(peer, message.id, self._inspection.answer(message, peer.caller))
                case _:
                    self._handle(peer, peer.caller, message)
        except PageddError as error:
            self._service.note_failure(error)
            self._refuse(peer, message_id, error)

    def _refuse(self, peer: Peer, message_id: str, error: PageddError) -> None:
        log.debug("refused a message of %s: %s", peer.caller, error.code)  # the rest may quote it
        self._send(peer, Failed(id=message_id, code=error.code, message=error.message, field=error.field))

    def _send(self, peer: Peer, message: DaemonMessage) -> None:
        # The end of a request must arrive even where its tokens no longer did.
        is_end = isinstance(message, Done | Failed) and message.id in self._live.get(peer, ())
        peer.send([PROTOCOL_VERSION, encode(message)], is_urgent=is_end)

    def _answer_later(self, peer: Peer, message_id: str, answer: Coroutine[None, None, DaemonMessage]) -> None:
        if len(self._questions) >= _MAX_QUESTIONS_UNDER_WAY:
            answer.close()
            raise PageddError("queue_full", f"{_MAX_QUESTIONS_UNDER_WAY} questions wait already; try again later")
        task = asyncio.get_running_loop().create_task(self._answer(peer, message_id, answer))
        self._questions.add(task)
        task.add_done_callback(self._questions.discard)

    async def _answer(self, peer: Peer, message_id: str, answer: Coroutine[None, None, DaemonMessage]) -> None:
        try:
            self._send(peer, await answer)
        except PageddError as error:
            self._cannot_answer(peer, message_id, error)
        except asyncio.CancelledError:
            self._cannot_answer(peer, message_id, PageddError("shutting_down", "the daemon is stopping"))
            raise
        except Exception:
            log.exception("a question could not be answered")
            self._cannot_answer(peer, message_id, PageddError("internal", "the answer broke; the log has the trace"))

    def _cannot_answer(self, peer: Peer, message_id: str, error: PageddError) -> None:
        """Counted, but no event: a viewer that asks again and again would fill the log that it shows."""
        self._service.metrics.failed(error.code)
        self._refuse(peer, message_id, error)

    def on_gone(self, peer: Peer) -> None:
        for request_id in self._live.pop(peer, {}).values():
            self._service.client_gone(request_id)

    def on_too_slow(self, peer: Peer) -> None:
        for request_id in list(self._live.get(peer, {}).values()):
            self._service.client_too_slow(request_id, f"{peer.backlog_bytes} bytes, limit {MAX_BACKLOG_BYTES},")


class _RequestsDoor(_Door):
    """`pagedd.sock`: a client starts requests and ends its own."""

    def _handle(self, peer: Peer, caller: Caller, message: ClientMessage) -> None:
        match message:
            case Generate() | Chat():
                self._start(peer, caller, message)
            case Cancel(id=message_id, target=target):
                live = self._live.get(peer, {})
                if target not in live:
                    raise PageddError("request_not_found", f"no live request {target[:ID_MAX_CHARS]!r}", field="target")
                self._service.cancel(live[target])
                self._send(peer, Ok(id=message_id))
            case _:
                raise PageddError("forbidden", "only through admin.sock")

    def _start(self, peer: Peer, caller: Caller, message: Generate | Chat) -> None:
        if message.id in self._live.get(peer, ()):
            raise PageddError("duplicate_request", f"a live request has id {message.id!r} already", field="id")

        def send(answer: DaemonMessage) -> None:
            self._send(peer, answer)
            if isinstance(answer, Done | Failed):
                self._forget(peer, message.id)

        [request_id] = self._service.start([message], caller, send)
        if self._service.is_live(request_id):
            self._live.setdefault(peer, {})[message.id] = request_id

    def _forget(self, peer: Peer, message_id: str) -> None:
        live = self._live.get(peer, {})
        live.pop(message_id, None)
        if not live:
            self._live.pop(peer, None)


class _AdminDoor(_Door):
    """`admin.sock`: root and the daemon's own user act on any request."""

    def _handle(self, peer: Peer, caller: Caller, message: ClientMessage) -> None:
        if not caller.is_admin:
            raise PageddError("forbidden", f"user {caller.name} is neither root nor the daemon's own user")
        match message:
            case EvictPrefix(id=message_id):
                self._answer_later(peer, message_id, self._inspection.evict(message, caller))
                return
            case Sleep(id=message_id):
                self._answer_later(peer, message_id, self._sleep(message_id, caller))
                return
            case Load(id=message_id):
                self._answer_later(peer, message_id, self._load(message, caller))
                return
            case Wake(id=message_id):
                self._service.device.wake(caller)
                self._send(peer, Ok(id=message_id))
                return
            case Cancel(id=message_id, target=target):
                found = self._service.cancel(target, by=caller)
            case SetPriority(id=message_id, target=target, priority=priority):
                found = self._service.set_priority(target, priority, by=caller)
            case _:
                raise PageddError("forbidden", "only through pagedd.sock")
        if not found:
            raise PageddError("request_not_found", f"no live request {target[:ID_MAX_CHARS]!r}", field="target")
        self._send(peer, Ok(id=message_id))

    async def _load(self, order: Load, caller: Caller) -> DaemonMessage:
        await self._service.device.load_model(order.model, order.served_name, caller)
        return Ok(id=order.id)

    async def _sleep(self, message_id: str, caller: Caller) -> DaemonMessage:
        await self._service.device.sleep(caller)
        return Ok(id=message_id)


def decode_message(payload: bytes) -> ClientMessage:
    """Raises `PageddError` for what is no message of a client."""
    try:
        return decode_client(payload)
    except msgspec.DecodeError as error:
        raise decoding_error(error) from error
    except (RecursionError, UnicodeDecodeError) as error:
        raise PageddError("malformed_message", str(error)) from error


def id_of(payload: bytes) -> str:
    """The id in a message whose other fields may be wrong, so that its sender knows which one was refused."""
    try:
        identified = msgspec.msgpack.decode(payload, type=_Identified)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return ""
    return identified.id[:ID_MAX_CHARS]


class _Identified(msgspec.Struct):
    id: str
