"""Bytes that are not HTTP, or half of it: they are refused with a code, and nothing else notices."""

import asyncio
from typing import Any

import msgspec
import pytest

from pagedd.daemon import http_body

from .http_door import Door


async def answer_to(door: Door, *parts: bytes) -> tuple[int, dict[str, Any]]:
    """Writes `parts` one after the other to a connection of its own; status and body of what comes back."""
    reader, writer = await door.connect()
    for part in parts:
        writer.write(part.replace(b"Host: x\r\n", door.head()))
        await writer.drain()
        await asyncio.sleep(0.02)
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(int(line.split()[1]) for line in head.splitlines() if line.startswith(b"Content-Length"))
    body = await reader.readexactly(length)
    writer.close()
    return int(head.split()[1]), msgspec.json.decode(body)


POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    "parts",
    [
        [b"\x16\x03\x01\x02\x00\x01\r\n\r\n"],
        [b"GET / HTTP/9.9\r\n\r\n"],
        [b"GET http://[::1/ HTTP/1.1\r\nHost: x\r\n\r\n"],
        [b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n"],
        [b"GET /ready HTTP/1.1\r\n" + b"A: b\r\n" * 1000 + b"\r\n"],
        [b"GET /ready HTTP/1.1\r\nX-Long: " + b"a" * 100_000 + b"\r\nHost: x\r\n\r\n"],
        [b"GET /ready HTTP/1.1\r\nA\x00: b\r\n\r\n"],
        [POST + b"Content-Length: many\r\n\r\n"],
        [POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}"],
        [POST + b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n{}"],
        [POST + b"Transfer-Encoding: chunked\r\n\r\nnot a size\r\n"],
        [POST + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}"],
        [POST + b"Content-Encoding: deflate\r\nContent-Length: 2\r\n\r\n", b"{}"],
    ],
    ids=lambda parts: repr(b"".join(parts))[:60],
)
async def test_what_is_not_http_is_refused_with_a_code_and_without_a_trace_in_the_log(
    door: Door, parts: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    status, answer = await answer_to(door, *parts)
    assert (status, answer["error"]["code"]) == (400, "malformed_message")
    assert len(answer["error"]["message"]) < 300
    assert not [record for record in caplog.records if record.exc_info]
    assert (await door.served.get("/ready"))[0] == 200


@pytest.mark.parametrize(
    "parts",
    [
        [POST + b"Transfer-Encoding: chunked\r\n\r\n", b"2\r\n{}\r\n", b"not a size\r\n"],
        [POST + b"Content-Length: 100\r\n\r\n{", b"}"],
    ],
    ids=["a wrong chunk", "too short"],
)
async def test_a_body_whose_end_does_not_come_is_refused_without_a_trace_in_the_log(
    door: Door, parts: list[bytes], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_body, "TIMEOUT_S", 0.2)
    status, answer = await answer_to(door, *parts)
    assert (status, answer["error"]["code"]) == (408, "body_timeout")
    assert not [record for record in caplog.records if record.exc_info]
    assert (await door.served.get("/ready"))[0] == 200


@pytest.mark.parametrize("target", [b"http://[:@/", b"http://a:b@[:]:@/"])
async def test_a_target_that_breaks_the_parser_ends_its_connection_and_nothing_else(
    door: Door, target: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = await door.connect()
    writer.write(b"GET " + target + b" HTTP/1.1\r\n" + door.head() + b"\r\n")
    answer = (await asyncio.wait_for(reader.read(), 10))[:12]  # to its end
    writer.close()
    assert answer[5:] in (b"", b"1.0 400", b"1.1 400")
    assert not [record for record in caplog.records if record.exc_info]
    assert (await door.served.get("/ready"))[0] == 200
