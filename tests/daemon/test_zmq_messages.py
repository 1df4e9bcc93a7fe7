"""What a message over ZeroMQ may be, and that what is none harms nobody but its sender."""

import asyncio
import os
import pickle
import socket

import msgspec
import pytest
import zmq

from pagedd.client.protocol import (
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    Accepted,
    Done,
    Failed,
    Ping,
    Pong,
    SetPriority,
    encode,
)

from .served import Served, is_alive, prompt
from .waiting import WAIT_S


@pytest.mark.parametrize(
    ("frames", "code", "message_id"),
    [
        ([pickle.dumps({"a": 1})], "malformed_message", ""),
        ([b""], "malformed_message", ""),
        ([b"", b""], "protocol_version", ""),
        ([b"hello"], "malformed_message", ""),
        ([PROTOCOL_VERSION], "malformed_message", ""),
        ([PROTOCOL_VERSION, b""], "malformed_message", ""),
        ([PROTOCOL_VERSION, pickle.dumps({"a": 1})], "missing_field", ""),
        ([PROTOCOL_VERSION, b"\xc1"], "malformed_message", ""),
        ([PROTOCOL_VERSION, b"\x91" * 100_000], "invalid_type", ""),
        ([PROTOCOL_VERSION, b"\x82\xa4type\xa8generate\xa2id\xa1\xff"], "malformed_message", ""),
        ([PROTOCOL_VERSION, b"x", b"y"], "malformed_message", ""),
        ([b"pagedd0", msgspec.msgpack.encode({"type": "ping", "id": "p"})], "protocol_version", ""),
        ([PROTOCOL_VERSION, msgspec.msgpack.encode({"type": "reboot", "id": "p"})], "invalid_value", "p"),
        ([PROTOCOL_VERSION, msgspec.msgpack.encode({"id": "p"})], "missing_field", "p"),
        ([PROTOCOL_VERSION, msgspec.msgpack.encode({"type": "ping"})], "missing_field", ""),
        ([PROTOCOL_VERSION, msgspec.msgpack.encode({"type": "ping", "id": 5})], "invalid_type", ""),
        ([PROTOCOL_VERSION, msgspec.msgpack.encode({"type": "ping", "id": ""})], "invalid_value", ""),
        ([PROTOCOL_VERSION, msgspec.msgpack.encode({"type": "ping", "id": "p" * 129})], "invalid_value", "p" * 128),
        ([PROTOCOL_VERSION, msgspec.msgpack.encode([1, 2])], "invalid_type", ""),
        ([PROTOCOL_VERSION, encode(SetPriority(id="p", target="a", priority=1))], "forbidden", "p"),
    ],
    ids=lambda value: repr(value)[:60],
)  # fmt: skip
async def test_what_is_no_message_is_answered_with_its_fault(
    served: Served, frames: list[bytes], code: str, message_id: str
) -> None:
    async with served.client() as client:
        await client.socket.send_multipart(frames)
        answer = await client.hear()
        assert isinstance(answer, Failed)
        assert (answer.code, answer.id) == (code, message_id)
        await client.say(Ping(id="still?"))
        assert isinstance(await client.hear(), Pong)


async def test_unknown_fields_are_ignored(served: Served) -> None:
    raw = {"type": "generate", "id": "a", "prompt": "a", "of_a_later_client": [1], "sampling": {"also": {}}}
    async with served.client() as client:
        await client.socket.send_multipart([PROTOCOL_VERSION, msgspec.msgpack.encode(raw)])
        assert isinstance(await client.hear_end(), Done)


async def test_a_frame_of_fifty_megabytes_costs_its_sender_the_connection_and_nobody_else(served: Served) -> None:
    served.host.reply = lambda request: None
    async with served.client() as client, served.client() as other:
        await other.say(prompt())
        assert isinstance(await other.hear(), Accepted)
        with client.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
            await client.socket.send_multipart([PROTOCOL_VERSION, bytes(50_000_000)])
            await asyncio.wait_for(monitor.recv_multipart(), WAIT_S)
            client.socket.disable_monitor()
        assert await is_alive(served)
        served.host.produce(served.host.submitted[0].request_id, b"x", finish_reason="length")
        assert isinstance(await other.hear_end(), Done)


async def test_bytes_that_are_not_even_zeromq_harm_nobody(served: Served) -> None:
    for raw in (b"", b"\x00" * 64, b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"\xff" + bytes(8) + b"\x7f\x03"):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(str(served.endpoints.requests))
            stranger.sendall(raw)
    assert await is_alive(served)


async def test_the_largest_message_that_is_allowed_is_read(served: Served) -> None:
    async with served.client() as client:
        await client.say(prompt("a" * (MAX_MESSAGE_BYTES - 1000)))
        end = await client.hear_end()
    assert isinstance(end, Failed)
    assert end.code == "prompt_too_long"
