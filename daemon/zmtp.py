"""ZMTP 3.1 on the wire, the bound side, mechanism NULL: bytes become events, and what is said becomes bytes.

Owns the grammar and the limits on what a peer may have it keep. Knows neither sockets nor time (`zmq_server.py`), nor
what messages mean. The sources are RFC 23 (3.0), RFC 37 (3.1: PING, SUBSCRIBE) and RFC 28 (REQ) of rfc.zeromq.org.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_MORE, _LONG, _COMMAND = 0x01, 0x02, 0x04
_LONG_HEAD = struct.Struct(">BQ")  # flags, size

_GREETING_BYTES = 64
_SIGNATURE_END, _VERSION_AT, _MECHANISM = 9, 10, slice(12, 32)
_OLDEST_VERSION = 3
# Signature, version, mechanism, as-server, filler.
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"NULL".ljust(20, b"\x00") + bytes(1 + 31)

# A READY has the socket's type and an identity of up to 255 bytes; a subscription's topic is bounded by who serves it.
_MAX_COMMAND_BYTES = 1024
_MAX_PING_CONTEXT_BYTES = 16
# What may be said to a peer that is refused, and is cut off otherwise.
_MAX_REASON_BYTES = 255

_SUBSCRIBERS = frozenset({b"SUB", b"XSUB"})


@dataclass(frozen=True, slots=True)
class SocketKind:
    """One end as its peers see it.

    Attributes:
        name: its Socket-Type.
        peers: the Socket-Types that may talk to it.
        max_message_bytes: of all frames of a message together.
        max_frames: of a message; a REQ's empty one counts.
    """

    name: bytes
    peers: frozenset[bytes]
    max_message_bytes: int
    max_frames: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The handshake is over: the peer may be told `ready(kind)`, and then anything."""


@dataclass(frozen=True, slots=True)
class Message:
    """Whole, without a REQ's envelope."""

    frames: list[bytes]


@dataclass(frozen=True, slots=True)
class Subscription:
    """A subscriber wants what begins with `topic`, or does not any more; as a command of 3.1 or a message of 3.0."""

    topic: bytes
    is_wanted: bool


@dataclass(frozen=True, slots=True)
class Ping:
    """Wants `pong(context)`."""

    context: bytes


@dataclass(frozen=True, slots=True)
class Unasked:
    """A frame that asks for nothing: part of a message, a PONG, a command that is unknown here."""


Event = Ready | Message | Subscription | Ping | Unasked
_UNASKED = Unasked()


class ZmtpError(Exception):
    """The peer is to be left. `answer` is what it can still be told: an ERROR, while hands are shaken; else nothing."""

    def __init__(self, reason: str, *, answer: bytes = b"") -> None:
        super().__init__(reason)
        self.answer = answer


class Decoder:
    """What one peer says. It keeps the bytes of what has not come whole, and no others."""

    def __init__(self, kind: SocketKind) -> None:
        self._kind = kind
        self._unread = bytearray()
        self._is_greeted = False
        self._peer_type: bytes | None = None  # until READY
        self._frames: list[bytes] = []
        self._message_bytes = 0

    @property
    def held_bytes(self) -> int:
        return len(self._unread) + self._message_bytes

    def feed(self, data: bytes) -> None:
        self._unread += data

    def next_event(self) -> Event | None:
        """What has come next, None when its bytes are not all there. After a `ZmtpError` nothing can be."""
        if not self._is_greeted and not self._take_greeting():
            return None
        if (taken := self._take_frame()) is None:
            return None
        flags, body = taken
        if flags & _COMMAND:
            return self._command(body)
        self._frames.append(body)
        self._message_bytes += len(body)
        if flags & _MORE:
            return _UNASKED
        frames, self._frames, self._message_bytes = self._frames, [], 0
        return self._message(frames)

    def encode(self, frames: Sequence[bytes]) -> bytes:
        """A message to this peer, in a REQ's envelope if it is one."""
        return message([b"", *frames] if self._peer_type == b"REQ" else frames)

    def _take_greeting(self) -> bool:
        # Looked at as far as it has come: whoever speaks HTTP, or an older ZMTP, may wait for an answer first.
        greeting = bytes(self._unread[:_GREETING_BYTES])
        if greeting[:1] not in (b"", b"\xff") or greeting[_SIGNATURE_END : _SIGNATURE_END + 1] not in (b"", b"\x7f"):
            raise ZmtpError("it does not begin as ZMTP does")
        if len(greeting) > _VERSION_AT and greeting[_VERSION_AT] < _OLDEST_VERSION:
            raise ZmtpError(f"ZMTP of version {greeting[_VERSION_AT]}, the oldest spoken here is {_OLDEST_VERSION}")
        if len(greeting) < _GREETING_BYTES:
            return False
        if greeting[_MECHANISM].rstrip(b"\x00") != b"NULL":
            raise _refusal("the mechanism is NULL")
        del self._unread[:_GREETING_BYTES]
        self._is_greeted = True
        return True

    def _take_frame(self) -> tuple[int, bytes] | None:
        """The next frame's flags and body, once all of it is there. Its size is judged before that."""
        unread = self._unread
        if not unread:
            return None
        flags = unread[0]
        if flags & ~(_MORE | _LONG | _COMMAND) or flags & (_COMMAND | _MORE) == _COMMAND | _MORE:
            raise self._error(f"a frame with the flags {flags:#04x}")
        begin = _LONG_HEAD.size if flags & _LONG else 2
        if len(unread) < begin:
            return None
        size = int.from_bytes(unread[1:begin])
        self._check_size(flags, size)
        end = begin + size
        if len(unread) < end:
            return None
        with memoryview(unread) as view, view[begin:end] as part:
            body = bytes(part)
        del unread[:end]
        return flags, body

    def _check_size(self, flags: int, size: int) -> None:
        if flags & _COMMAND:
            if size > _MAX_COMMAND_BYTES:
                raise self._error(f"a command of {size} bytes, limit {_MAX_COMMAND_BYTES}")
            return
        if self._peer_type is None:
            raise self._error("a message before READY")
        if self._message_bytes + size > self._kind.max_message_bytes:
            raise self._error(
                f"a message of {self._message_bytes + size} bytes or more, limit {self._kind.max_message_bytes}"
            )
        if len(self._frames) >= self._kind.max_frames:
            raise self._error(f"a message of more than {self._kind.max_frames} frames")

    def _command(self, body: bytes) -> Event:
        begin = 1 + body[0] if body else 0
        if not 1 < begin <= len(body):
            raise self._error("a command without a name")
        name, data = body[1:begin], body[begin:]
        if self._peer_type is None:
            if name != b"READY":
                raise self._error(f"{name[:16]!r} where READY is due")
            self._peer_type = self._type_of_ready(data)
            return Ready()
        match name:
            case b"PING":
                # Two bytes say how long the peer will be patient; whether it is still there is the kernel's to tell.
                return Ping(data[2 : 2 + _MAX_PING_CONTEXT_BYTES])
            case b"SUBSCRIBE" | b"CANCEL" if self._peer_type in _SUBSCRIBERS:
                return Subscription(data, is_wanted=name == b"SUBSCRIBE")
            case _:
                return _UNASKED

    def _type_of_ready(self, data: bytes) -> bytes:
        properties = {name.lower(): value for name, value in self._properties(data)}
        peer_type = properties.get(b"socket-type", b"")
        if peer_type not in self._kind.peers:
            spoken = b", ".join(sorted(self._kind.peers)).decode()
            raise self._error(f"a socket of type {peer_type[:16]!r}; a {self._kind.name.decode()} talks to {spoken}")
        return peer_type

    def _properties(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        # A name after its length in a byte, a value after its length in four.
        at = 0
        while at < len(data):
            value_size_at = at + 1 + data[at]
            value_at = value_size_at + 4
            end = value_at + int.from_bytes(data[value_size_at:value_at])
            if end > len(data) or value_at > len(data):
                raise self._error("a READY that is cut off")
            yield data[at + 1 : value_size_at], data[value_at:end]
            at = end

    def _message(self, frames: list[bytes]) -> Event:
        if self._peer_type in _SUBSCRIBERS:
            [head, *more] = frames
            if more or head[:1] not in (b"\x00", b"\x01"):
                return _UNASKED  # an XSUB may say anything
            return Subscription(head[1:], is_wanted=head[:1] == b"\x01")
        if self._peer_type == b"REQ":
            if frames[0] or len(frames) == 1:
                raise self._error("a message of a REQ without its empty frame")
            return Message(frames[1:])
        return Message(frames)

    def _error(self, reason: str) -> ZmtpError:
        return _refusal(reason) if self._peer_type is None else ZmtpError(reason)


def ready(kind: SocketKind) -> bytes:
    name, value = b"Socket-Type", kind.name
    return command(b"READY", bytes([len(name)]) + name + len(value).to_bytes(4) + value)


def pong(context: bytes) -> bytes:
    return command(b"PONG", context)


def message(frames: Sequence[bytes]) -> bytes:
    """All `frames`, at least one."""
    last = len(frames) - 1
    return b"".join(_frame(body, _MORE if i < last else 0) for i, body in enumerate(frames))


def command(name: bytes, data: bytes) -> bytes:
    return _frame(bytes([len(name)]) + name + data, _COMMAND)


def _refusal(reason: str) -> ZmtpError:
    said = reason.encode()[:_MAX_REASON_BYTES]
    return ZmtpError(reason, answer=command(b"ERROR", bytes([len(said)]) + said))


def _frame(body: bytes, flags: int) -> bytes:
    if len(body) < 256:
        return bytes((flags, len(body))) + body
    return _LONG_HEAD.pack(flags | _LONG, len(body)) + body
