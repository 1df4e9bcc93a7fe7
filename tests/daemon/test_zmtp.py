"""ZMTP's bytes: however they are cut, the same is heard; whatever they are, no more is kept than is allowed."""

from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedd.daemon import zmtp
from pagedd.daemon.zmtp import Decoder, Event, Message, Ping, Ready, SocketKind, Subscription, Unasked, ZmtpError

ROUTER = SocketKind(b"ROUTER", frozenset({b"DEALER", b"REQ"}), max_message_bytes=1000, max_frames=3)
PUB = SocketKind(b"PUB", frozenset({b"SUB", b"XSUB"}), max_message_bytes=10, max_frames=1)
# As they are printed in the RFCs.
GREETING = bytes.fromhex("ff00000000000000007f0301") + b"NULL" + bytes(16) + b"\x00" + bytes(31)
GREETING_30 = GREETING.replace(b"\x03\x01", b"\x03\x00")


def property_(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + len(value).to_bytes(4) + value


def ready(*properties: bytes) -> bytes:
    body = b"\x05READY" + b"".join(properties)
    return bytes([4, len(body)]) + body


def ready_as(socket_type: bytes, identity: bytes = b"") -> bytes:
    return ready(property_(b"Socket-Type", socket_type), property_(b"Identity", identity))


def heard(decoder: Decoder, data: bytes) -> list[Event]:
    decoder.feed(data)
    events = []
    while (event := decoder.next_event()) is not None:
        events.append(event)
    return events


def decoder_of(kind: SocketKind, socket_type: bytes) -> Decoder:
    decoder = Decoder(kind)
    assert heard(decoder, GREETING + ready_as(socket_type)) == [Ready()]
    return decoder


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[begin:end] for begin, end in pairwise(edges)]


frames = st.lists(st.binary(max_size=300), min_size=1, max_size=3)
cuts = st.lists(st.integers(0, 5000), max_size=30)


@given(st.lists(frames, max_size=5), cuts)
def test_messages_arrive_whole_however_their_bytes_are_cut(messages: list[list[bytes]], places: list[int]) -> None:
    said = GREETING + ready_as(b"DEALER", b"squatter") + b"".join(map(zmtp.message, messages))
    decoder = Decoder(ROUTER)
    events = [event for part in cut(said, places) for event in heard(decoder, part)]
    assert [event for event in events if not isinstance(event, Unasked)] == [Ready(), *map(Message, messages)]
    assert decoder.held_bytes == 0


hostile = st.one_of(
    st.binary(max_size=200),
    st.builds(zmtp.message, frames),
    st.builds(zmtp.command, st.binary(max_size=20), st.binary(max_size=100)),
    st.builds(ready_as, st.sampled_from([b"DEALER", b"REQ", b"SUB", b""]), st.binary(max_size=255)),
    st.just(GREETING),
    st.integers(0, 2**64 - 1).map(lambda size: b"\x03" + size.to_bytes(8)),
)


@given(st.sampled_from([ROUTER, PUB]), st.lists(hostile, max_size=8).map(b"".join), cuts)
def test_any_bytes_are_understood_or_refused_and_what_is_kept_is_bounded(
    kind: SocketKind, data: bytes, places: list[int]
) -> None:
    decoder = Decoder(kind)
    with suppress(ZmtpError):
        for part in cut(GREETING + data, places):
            heard(decoder, part)
            # The largest that may be under way: a command, and the head of a long frame.
            assert decoder.held_bytes <= 1024 + 9


@pytest.mark.parametrize(("size", "head"), [(0, b"\x00\x00"), (255, b"\x00\xff"), (256, b"\x02" + (256).to_bytes(8))])
def test_a_frame_of_up_to_255_bytes_is_short(size: int, head: bytes) -> None:
    assert zmtp.message([bytes(size)]) == head + bytes(size)


def test_greeting_and_ready_are_those_of_the_rfc() -> None:
    assert zmtp.GREETING == GREETING
    assert zmtp.ready(ROUTER) == b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06ROUTER"


def test_names_of_properties_may_be_in_any_case_and_others_are_passed_over() -> None:
    said = ready(property_(b"X-Name", b"v"), property_(b"SOCKET-TYPE", b"DEALER"), property_(b"Resource", b""))
    assert heard(Decoder(ROUTER), GREETING_30 + said) == [Ready()]


def test_a_ping_asks_for_its_context_and_what_is_unknown_for_nothing() -> None:
    decoder = decoder_of(ROUTER, b"DEALER")
    assert heard(decoder, zmtp.command(b"PING", b"\x00\x0acontext")) == [Ping(b"context")]
    assert zmtp.pong(b"context") == b"\x04\x0c\x04PONGcontext"
    for command in (zmtp.pong(b""), zmtp.command(b"NEWS", b"x"), zmtp.command(b"SUBSCRIBE", b"")):
        assert heard(decoder, command) == [Unasked()]


def test_a_subscription_is_a_command_of_31_or_a_message_of_30() -> None:
    decoder = decoder_of(PUB, b"SUB")
    assert heard(decoder, zmtp.command(b"SUBSCRIBE", b"a") + zmtp.command(b"CANCEL", b"a")) == [
        Subscription(b"a", is_wanted=True),
        Subscription(b"a", is_wanted=False),
    ]
    assert heard(decoder, zmtp.message([b"\x01"]) + zmtp.message([b"\x00b"])) == [
        Subscription(b"", is_wanted=True),
        Subscription(b"b", is_wanted=False),
    ]
    assert heard(decoder, zmtp.message([b"hello"])) == [Unasked()]


def test_a_req_has_an_empty_frame_before_its_messages_and_gets_one() -> None:
    decoder = decoder_of(ROUTER, b"REQ")
    assert heard(decoder, zmtp.message([b"", b"a"])) == [Unasked(), Message([b"a"])]
    assert decoder.encode([b"b"]) == zmtp.message([b"", b"b"])
    with pytest.raises(ZmtpError, match="without its empty frame"):
        heard(decoder, zmtp.message([b"a", b"b"]))


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"G", "begin"),
        (b"\xff" + bytes(9), "begin"),
        (GREETING[:10] + b"\x01", "version 1"),  # no more comes from one that speaks 2.0, until it is answered
    ],
)
def test_what_is_no_zmtp_of_today_is_left_at_once_and_without_a_word(said: bytes, reason: str) -> None:
    with pytest.raises(ZmtpError, match=reason) as left:
        heard(Decoder(ROUTER), said)
    assert left.value.answer == b""


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (GREETING.replace(b"NULL", b"PLAIN"), "mechanism"),
        (GREETING.replace(b"NULL", b"NULLX"), "mechanism"),
        (GREETING + zmtp.message([b"a"]), "before READY"),
        (GREETING + zmtp.command(b"PING", b"\x00\x00"), "READY is due"),
        (GREETING + zmtp.command(b"ERROR", b"\x00"), "READY is due"),
        (GREETING + ready_as(b"SUB"), "type b'SUB'; a ROUTER talks to DEALER, REQ"),
        (GREETING + ready(), "type b''"),
        (GREETING + ready(b"\x0bSocket-Type\x00\x00\x00\x07DEALER"), "cut off"),
        (GREETING + ready(b"\x0bSocket-Type\x00\x00\x00"), "cut off"),
        (GREETING + ready(b"\xff"), "cut off"),
        (GREETING + b"\x04\x00", "without a name"),
        (GREETING + b"\x04\x01\x00", "without a name"),
        (GREETING + b"\x04\x01\x05", "without a name"),
        (GREETING + b"\x05", "flags 0x05"),
        (GREETING + b"\x08", "flags 0x08"),
        (GREETING + b"\x06" + (1025).to_bytes(8), "1025 bytes, limit 1024"),
    ],
)
def test_a_handshake_that_is_wrong_is_refused_with_the_reason(said: bytes, reason: str) -> None:
    with pytest.raises(ZmtpError, match=reason) as refused:
        heard(Decoder(ROUTER), said)
    text = str(refused.value).encode()
    assert refused.value.answer == zmtp.command(b"ERROR", bytes([len(text)]) + text)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"\x02" + (1001).to_bytes(8), "1001 bytes or more, limit 1000"),
        (b"\x02" + (2**64 - 1).to_bytes(8), "limit 1000"),
        (zmtp.message([bytes(600), bytes(401)])[:-401], "1001 bytes or more, limit 1000"),
        (b"\x01\x00" * 3 + b"\x01\x00", "more than 3 frames"),
        (b"\x05", "flags 0x05"),
    ],
)
def test_a_message_beyond_its_limits_ends_the_talk_before_its_bytes_have_come(said: bytes, reason: str) -> None:
    with pytest.raises(ZmtpError, match=reason) as left:
        heard(decoder_of(ROUTER, b"DEALER"), said)
    assert left.value.answer == b""
