"""What one HTTP connection may take: time for a head and for an answer, and a place among its listener's."""

import asyncio
import gzip
import tracemalloc
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from pagedd.daemon import http_api, http_connection

from .served import Served, serving
from .waiting import WAIT_S, until

Run = Callable[[Coroutine[Any, Any, None]], None]
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]

ASK = b"GET /ready HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    made: Run = request.param
    return made


async def connect(served: Served) -> Connection:
    return await asyncio.open_unix_connection(str(served.endpoints.http))


async def is_answered(connection: Connection) -> bool:
    """Whether it is asked and answers; False when it is closed."""
    reader, writer = connection
    writer.write(ASK)
    try:
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WAIT_S)
        await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]))
    except (asyncio.IncompleteReadError, ConnectionError):
        return False
    return b" 200 " in head


async def is_closed(connection: Connection) -> bool:
    """Waits until it is, without a word."""
    return await asyncio.wait_for(connection[0].read(), WAIT_S) == b""


def close(*connections: Connection) -> None:
    for _, writer in connections:
        writer.close()


def test_beyond_the_bound_the_idle_connection_that_was_used_least_recently_gives_way(
    socket_folder: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.setattr(http_api, "max_connections", lambda: 2)

    async def meet_the_bound() -> None:
        async with serving(socket_folder) as served:
            first, second = [await connect(served) for _ in range(2)]
            assert await is_answered(second)
            assert await is_answered(first)
            third = await connect(served)
            assert await is_closed(second)
            assert [await is_answered(connection) for connection in (first, third)] == [True, True]
            close(first, second, third)

    run(meet_the_bound())


def test_a_connection_that_asks_something_gives_way_to_nobody(
    socket_folder: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.setattr(http_api, "max_connections", lambda: 1)

    async def meet_the_bound() -> None:
        async with serving(socket_folder) as served:
            served.host.reply = lambda request: None
            busy = await connect(served)
            busy[1].write(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 15\r\n\r\n" + b'{"prompt": [5]}'
            )
            await until(lambda: bool(served.host.submitted))
            late = await connect(served)
            assert await is_closed(late)
            served.host.produce(served.host.submitted[0].request_id, b"x", finish_reason="length")
            assert b" 200 " in await busy[0].readline()
            close(busy, late)

    run(meet_the_bound())


def test_strangers_on_the_port_leave_the_socket_to_its_members(
    socket_folder: Path, free_port: int, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.setattr(http_api, "max_connections", lambda: 8)
    keys = socket_folder / "keys"
    keys.write_text("first-key\n")

    async def crowd_the_port() -> None:
        async with serving(socket_folder, http_port=free_port, api_key_file=keys) as served:
            members = [await connect(served) for _ in range(6)]
            strangers = [await asyncio.open_connection("127.0.0.1", free_port) for _ in range(20)]
            # Two are left of them, and the next one is served all the same.
            assert all([await is_closed(stranger) for stranger in strangers[:18]])
            assert await is_answered(await asyncio.open_connection("127.0.0.1", free_port))
            assert all([await is_answered(member) for member in members])
            close(*members, *strangers)

    run(crowd_the_port())


@pytest.mark.parametrize("sent", [b"", b"G", ASK[:-2], ASK + b"GET /"], ids=["nothing", "a letter", "a head", "second"])
def test_a_head_that_does_not_come_whole_ends_its_connection(
    socket_folder: Path, monkeypatch: pytest.MonkeyPatch, run: Run, sent: bytes
) -> None:
    monkeypatch.setattr(http_connection, "HEAD_TIMEOUT_S", 0.2)

    async def dawdle() -> None:
        async with serving(socket_folder) as served:
            slow = await connect(served)
            if sent.startswith(ASK):
                assert await is_answered(slow)
            slow[1].write(sent.removeprefix(ASK))
            assert await is_closed(slow)
            close(slow)

    run(dawdle())


def test_a_connection_that_has_asked_may_rest(socket_folder: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setattr(http_connection, "HEAD_TIMEOUT_S", 0.05)

    async def rest() -> None:
        async with serving(socket_folder) as served:
            resting = await connect(served)
            assert await is_answered(resting)
            await asyncio.sleep(0.2)
            assert await is_answered(resting)
            close(resting)

    run(rest())


def test_a_whole_answer_that_nobody_reads_is_not_kept(
    socket_folder: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.setattr(http_connection, "READ_TIMEOUT_S", 0.1)

    async def ask_and_leave_it() -> None:
        async with serving(socket_folder) as served:
            deaf, slow = await connect(served), await connect(served)
            body = b'{"tokens": [' + b"65," * 2000 + b"65]}"
            ask = b"POST /detokenize HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
            served.service.served_model().tokenizer.decode = lambda *_, **__: "x" * 4_000_000  # type: ignore
            for _, writer in (deaf, slow):
                writer.transport.pause_reading()  # type: ignore[attr-defined]
                writer.write(ask)
            for _ in range(10):  # it takes something now and then
                slow[1].transport.resume_reading()  # type: ignore[attr-defined]
                await asyncio.sleep(0.02)
                slow[1].transport.pause_reading()  # type: ignore[attr-defined]
                await asyncio.sleep(0.05)
            slow[1].transport.resume_reading()  # type: ignore[attr-defined]
            deaf[1].transport.resume_reading()  # type: ignore[attr-defined]
            assert len(await read_to_the_end(slow, 4_000_000)) >= 4_000_000
            assert len(await read_to_the_end(deaf, 4_000_000)) < 4_000_000
            close(deaf, slow)

    run(ask_and_leave_it())


def test_a_connection_that_rests_keeps_no_answer(socket_folder: Path, run: Run) -> None:
    async def rest() -> None:
        async with serving(socket_folder) as served:
            resting = await connect(served)
            tracemalloc.start()
            served.service.served_model().tokenizer.decode = lambda *_, **__: "x" * 4_000_000  # type: ignore
            resting[1].write(
                b"POST /detokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 16\r\n\r\n" + b'{"tokens": [65]}'
            )
            assert len(await read_to_the_end(resting, 4_000_000)) >= 4_000_000
            await asyncio.sleep(0.01)
            num_bytes, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert num_bytes < 2_000_000
            close(resting)

    run(rest())


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br"])
def test_a_compressed_body_is_refused_and_never_unpacked(
    socket_folder: Path, monkeypatch: pytest.MonkeyPatch, run: Run, encoding: str
) -> None:
    async def send() -> None:
        async with serving(socket_folder) as served:
            headers, bomb = {"Content-Encoding": encoding}, gzip.compress(bytes(1 << 20))
            async with served.http.post("http://localhost/tokenize", data=bomb, headers=headers) as response:
                assert (await response.json())["error"]["message"] == (
                    f"Content-Encoding: {encoding}; send the body as it is"
                )
                assert response.status == 400

    def unpack(*arguments: object) -> None:
        raise AssertionError("it is unpacked")

    monkeypatch.setattr("aiohttp.http_parser.DeflateBuffer.__init__", unpack)
    run(send())


async def read_to_the_end(connection: Connection, num_bytes: int) -> bytes:
    found = b""
    try:
        while len(found) < num_bytes and (part := await asyncio.wait_for(connection[0].read(1 << 16), WAIT_S)):
            found += part
    except ConnectionError:
        pass
    return found
