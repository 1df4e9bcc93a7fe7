"""Bodies that are too large, too slow or too many at once, over the Unix socket and over TCP."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from pagedd.client.protocol import MAX_MESSAGE_BYTES, Chat, Generate
from pagedd.daemon import http_api, http_body, http_handlers
from pagedd.daemon.http_routes import ROUTES
from pagedd.daemon.openai_schema import tokenize_request

from .http_door import Door
from .served import serving
from .waiting import until

TAKES_A_BODY = [route.path for route in ROUTES if route.body is not None]


async def answer(reader: asyncio.StreamReader) -> tuple[int, str, str, dict[str, str]]:
    """Status, code, message and headers."""
    async with asyncio.timeout(20):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
        headers = {name: value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        body = msgspec.json.decode(await reader.readexactly(int(headers["Content-Length"])))
    error = body.get("error", {"code": "", "message": ""})
    return int(head[0].split()[1]), error["code"], error["message"], headers


@pytest.mark.parametrize("path", TAKES_A_BODY)
async def test_a_body_that_says_it_is_too_large_is_refused_before_it_comes(door: Door, path: str) -> None:
    async with door.sending(path, b"Content-Length: %d" % (MAX_MESSAGE_BYTES + 1)) as (reader, _):
        status, code, message, _ = await answer(reader)
    assert (status, code) == (413, "message_too_large")
    assert message == "a body of 8388609 bytes, limit 8388608; send less"


@pytest.mark.parametrize("path", TAKES_A_BODY)
async def test_a_body_that_becomes_too_large_is_refused(door: Door, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_body, "MAX_MESSAGE_BYTES", 1000)
    async with door.sending(path, b"Transfer-Encoding: chunked") as (reader, writer):
        writer.write(b"3e9\r\n" + b" " * 1001 + b"\r\n")
        assert (await answer(reader))[:2] == (413, "message_too_large")


@pytest.mark.parametrize("path", TAKES_A_BODY)
async def test_a_body_that_does_not_arrive_in_time_is_refused(
    door: Door, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_body, "TIMEOUT_S", 0.1)
    async with door.sending(path, b"Content-Length: 100") as (reader, writer):
        writer.write(b"{")
        status, code, message, _ = await answer(reader)
    assert (status, code) == (408, "body_timeout")
    assert message.startswith("1 bytes of a body came in 0.1 s and it is not whole; send it faster")


async def test_large_bodies_that_come_slowly_all_at_once_have_a_bound_and_small_ones_get_past_them(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_body, "MAX_BYTES_TOGETHER", 100_000)
    monkeypatch.setattr(http_body, "MAX_BYTES_OF_CALLER", 100_000)
    part = b" " * 32_768
    async with asyncio.TaskGroup() as group:
        may_end = asyncio.Event()
        refused: list[tuple[int, str, str, dict[str, str]]] = []

        async def send() -> None:
            async with door.sending("/tokenize", b"Content-Length: 1000000") as (reader, writer):
                writer.write(part)
                told = asyncio.ensure_future(answer(reader))
                ended = asyncio.ensure_future(may_end.wait())
                await asyncio.wait({told, ended}, return_when=asyncio.FIRST_COMPLETED)
                if told.done():
                    refused.append(told.result())
                for waits in (told, ended):
                    waits.cancel()

        tasks = [group.create_task(send()) for _ in range(50)]
        # 16 KiB of each are free: of the rest of 32 KiB six fit into 100 000 bytes.
        await until(lambda: len(refused) == 44)
        assert await door.served.post("/tokenize", {"prompt": "abc"}) == (
            200,
            {"tokens": [97, 98, 99], "count": 3, "max_model_len": 2048},
        )
        may_end.set()
        await asyncio.gather(*tasks)
    assert {(status, code, headers["Retry-After"]) for status, code, _, headers in refused} == {
        (503, "too_many_bodies", "1")
    }
    assert refused[0][2] == "98304 bytes of this caller's bodies are on their way, limit 100000; try again shortly"
    large = b'{"prompt": "a"' + part + b"}"
    assert (await door.served.post("/tokenize", large))[0] == 200, "whoever broke off gave back what it held"


async def test_a_caller_that_sends_large_bodies_slowly_keeps_nobody_elses_out(
    socket_folder: Path, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_body, "MAX_BYTES_TOGETHER", 100_000)
    monkeypatch.setattr(http_body, "MAX_BYTES_OF_CALLER", 40_000)
    large = b'{"prompt": "a"' + b" " * 40_000 + b"}"
    length = b"Content-Length: %d"
    keys = socket_folder / "keys"
    keys.write_text("greedy first-key\nother second-key\n")
    async with serving(socket_folder, http_port=free_port, api_key_file=keys) as running:
        door = Door(running, free_port)
        slow = door.sending("/tokenize", length % 1_000_000)
        slow_too = door.sending("/tokenize", length % 1_000_000)
        async with slow as (reader, writer), slow_too as (another_reader, another_writer):
            writer.write(large)
            another_writer.write(large)
            answers = {asyncio.ensure_future(answer(one)) for one in (reader, another_reader)}
            (told,), (untold,) = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
            status, code, message, _ = told.result()
            assert (status, code) == (503, "too_many_bodies")
            assert "bytes of this caller's bodies are on their way, limit 40000" in message
            async with door.sending("/tokenize", length % len(large), b"second-key") as (reader, writer):
                writer.write(large)
                assert (await answer(reader))[0] == 200
            untold.cancel()


async def test_a_connection_with_half_of_a_head_is_closed(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_api, "_IDLE_CONNECTION_S", 0.1)
    reader, writer = await asyncio.open_unix_connection(str(door.served.endpoints.http))
    writer.write(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-")
    async with asyncio.timeout(20):
        assert await reader.read() == b""
    writer.close()


async def test_a_body_counts_until_it_has_been_parsed_and_no_longer(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: list[http_body.BodyReader] = []
    counted: list[int] = []
    read = http_body.BodyReader.read

    def note_reader(reader: http_body.BodyReader, *args: object):
        readers.append(reader)
        return read(reader, *args)

    def parse(body: bytearray) -> Generate | Chat:
        counted.append(readers[0].num_bytes.total())
        return tokenize_request(body)

    monkeypatch.setattr(http_body.BodyReader, "read", note_reader)
    monkeypatch.setattr(http_handlers, "tokenize_request", parse)
    body = b'{"prompt": "a"' + b" " * 40_000 + b"}"
    assert (await door.served.post("/tokenize", body))[0] == 200
    assert counted == [len(body) - http_body.FREE_BYTES]
    assert not readers[0].num_bytes
