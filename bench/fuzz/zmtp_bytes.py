"""What comes over a ZeroMQ connection: the same is heard however it is cut, and no more is kept than a message has."""

from collections.abc import Iterable

from pagedd.bench.fuzz.target import Target
from pagedd.client.protocol import PROTOCOL_VERSION, Ping, encode
from pagedd.daemon import stats_feed, zmq_api
from pagedd.daemon.zmtp import GREETING, Decoder, Event, SocketKind, ZmtpError, command, message, ready

# The largest command, and the head of a long frame.
_MAX_COMMAND_BYTES = 1024 + 9
_CUT_BYTES = 7  # so that heads are cut, too


def read(data: bytes) -> None:
    for kind in (zmq_api.KIND, stats_feed.KIND):
        heard = _hear(kind, [data])
        assert _hear(kind, (data[at : at + _CUT_BYTES] for at in range(0, len(data), _CUT_BYTES))) == heard


def _hear(kind: SocketKind, parts: Iterable[bytes]) -> list[Event | str]:
    """The events, and the reason of the end if there was one."""
    decoder, events = Decoder(kind), list[Event | str]()
    for part in parts:
        decoder.feed(part)
        try:
            while (event := decoder.next_event()) is not None:
                events.append(event)
        except ZmtpError as error:
            return [*events, str(error)]
        assert decoder.held_bytes <= kind.max_message_bytes + _MAX_COMMAND_BYTES
    return events


def _hello(socket_type: bytes) -> bytes:
    return GREETING + ready(SocketKind(socket_type, frozenset(), max_message_bytes=0, max_frames=0))


TARGET = Target(
    read,
    [
        _hello(b"DEALER") + message([PROTOCOL_VERSION, encode(Ping(id="a"))]) + command(b"PING", b"\x00\x00context"),
        _hello(b"REQ") + message([b"", PROTOCOL_VERSION, bytes(300)]),
        _hello(b"SUB") + command(b"SUBSCRIBE", b"a") + message([b"\x01"]) + command(b"CANCEL", b"a"),
        _hello(b"PULL"),
    ],
)
