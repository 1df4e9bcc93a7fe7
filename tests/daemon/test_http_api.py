"""HTTP over a Unix socket and TCP, with a scripted engine."""

import asyncio
import os
import stat
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from pagedd.client.errors import PageddError
from pagedd.client.protocol import MAX_MESSAGE_BYTES
from pagedd.daemon import http_body, http_generate
from pagedd.daemon.engine_state import EngineState
from pagedd.daemon.telemetry import TelemetryCollector

from .byte_model import EOS
from .scripted_host import ScriptedHost
from .served import Served, decode_events, serving
from .waiting import WAIT_S, until

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@dataclass
class Door:
    """One of the two ways to the same API: the Unix socket, or a TCP port with a key."""

    served: Served
    port: int | None

    @property
    def head(self) -> bytes:
        """The headers that it asks for."""
        return b"Host: localhost:%d\r\nAuthorization: Bearer first-key\r\n" % self.port if self.port else b"Host: x\r\n"

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self.port is None:
            return await asyncio.open_unix_connection(str(self.served.endpoints.http))
        return await asyncio.open_connection("127.0.0.1", self.port)


@pytest.fixture(params=["unix", "tcp"])
async def door(request: pytest.FixtureRequest, socket_folder: Path, free_port: int) -> AsyncIterator[Door]:
    keys = socket_folder / "keys"
    keys.write_text("first-key\n")
    async with serving(socket_folder, http_port=free_port, api_key_file=keys) as running:
        yield Door(running, free_port if request.param == "tcp" else None)


# Streams


async def test_a_stream_with_usage_has_null_in_its_chunks_and_one_last_chunk_without_choices(served: Served) -> None:
    served.host.num_cached_tokens = 1
    body = {"prompt": "ab", "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last, end = await served.events("/v1/completions", body)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["H", "e", "l"]
    assert [chunk["usage"] for chunk in chunks] == [None, None, None]
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert end == "[DONE]"


@pytest.mark.parametrize("options", [{}, {"stream_options": None}, {"stream_options": {"include_usage": False}}])
async def test_a_stream_that_was_not_asked_for_usage_does_not_mention_it(served: Served, options: Any) -> None:
    *chunks, end = await served.events("/v1/completions", {"prompt": "ab", "max_tokens": 2, "stream": True, **options})
    assert len(chunks) == 2
    assert all("usage" not in chunk for chunk in chunks)
    assert end == "[DONE]"


async def test_a_chat_stream_begins_with_the_role_and_ends_with_the_reason(served: Served) -> None:
    served.host.reply = lambda request: [*b"Hi", EOS]
    *chunks, end = await served.events("/v1/chat/completions", {**CHAT, "stream": True})
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "H"},
        {"content": "i"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert end == "[DONE]"


async def test_choices_of_all_prompts_are_numbered_through(served: Served) -> None:
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 1, "stream": True}
    *chunks, _ = await served.events("/v1/completions", body)
    assert sorted(chunk["choices"][0]["index"] for chunk in chunks) == [0, 1, 2, 3]
    _, whole = await served.post("/v1/completions", {**body, "stream": False})
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert whole["usage"]["prompt_tokens"] == 2
    assert whole["usage"]["completion_tokens"] == 4


async def test_an_error_before_the_first_token_is_a_status(served: Served) -> None:
    served.host.reply = lambda request: None
    asked = asyncio.create_task(served.post("/v1/completions", {"prompt": "a", "stream": True}))
    await until(lambda: bool(served.host.submitted))
    served.host.on_refused(served.host.submitted[0].request_id, "out_of_memory", "no room")
    status, answer = await asked
    assert status == 500
    assert answer["error"] == {"message": "no room", "type": "server_error", "param": None, "code": "out_of_memory"}


async def test_an_error_in_the_middle_is_an_event_and_the_end_of_the_stream(served: Served) -> None:
    served.host.reply = lambda request: None
    asked = asyncio.create_task(served.events("/v1/completions", {"prompt": ["a", "b"], "stream": True}))
    await until(lambda: len(served.host.submitted) == 2)
    first, second = (request.request_id for request in served.host.submitted)
    served.host.produce(first, b"x")
    await asyncio.sleep(0.05)
    served.host.produce(first, [], finish_reason="error", error_code="nan_logits", error_message="not finite")
    chunk, error = await asked
    assert chunk["choices"][0]["text"] == "x"
    assert error["error"]["code"] == "nan_logits"
    await until(lambda: (second, None) in served.host.aborted)


# Log-probabilities


async def test_log_probabilities_have_both_of_openais_forms(served: Served) -> None:
    served.host.reply = lambda request: list("é!".encode())
    _, completion = await served.post("/v1/completions", {"prompt": "a", "logprobs": 1})
    assert completion["choices"][0]["logprobs"] == {
        "tokens": ["bytes:\\xc3", "bytes:\\xa9", "!"],
        "token_logprobs": [-0.5, -0.5, -0.5],
        "top_logprobs": [{"bytes:\\xc3": -0.5}, {"bytes:\\xa9": -0.5}, {"!": -0.5}],
        "text_offset": [0, 0, 1],
    }
    _, chat = await served.post("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 1})
    assert chat["choices"][0]["logprobs"]["content"][0] == {
        "token": "bytes:\\xc3",
        "logprob": -0.5,
        "bytes": [0xC3],
        "top_logprobs": [{"token": "bytes:\\xc3", "logprob": -0.5, "bytes": [0xC3]}],
    }


async def test_offsets_of_a_stream_go_on_where_the_last_chunk_ended(served: Served) -> None:
    body = {"prompt": "a", "logprobs": 0, "max_tokens": 3, "stream": True}
    *chunks, _ = await served.events("/v1/completions", body)
    assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks] == [[0], [1], [2]]
    assert chunks[0]["choices"][0]["logprobs"]["top_logprobs"] is None


# Clients that leave, and clients that do not read


async def send(door: Door, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Asks for a completion over a connection of its own."""
    reader, writer = await door.connect()
    raw = msgspec.json.encode(body)
    writer.write(b"POST /v1/completions HTTP/1.1\r\n%bContent-Length: %d\r\n\r\n%b" % (door.head, len(raw), raw))
    return reader, writer


async def leave_after(door: Door, body: dict[str, Any], num_events: int) -> None:
    """Reads some events and closes the connection."""
    reader, writer = await send(door, body)
    for _ in range(num_events):
        await reader.readuntil(b"data: ")
    writer.close()


async def test_two_hundred_clients_that_leave_in_the_middle_stop_their_requests_and_harm_no_other(door: Door) -> None:
    served = door.served
    served.host.reply = lambda request: [97] * (100_000 if request.prompt_token_ids == [98] else 5)
    for _ in range(200):
        await leave_after(door, {"prompt": "b", "max_tokens": 2000, "stream": True}, 5)
        status, answer = await served.post("/v1/completions", {"prompt": "a", "max_tokens": 5})
        assert (status, answer["choices"][0]["text"]) == (200, "aaaaa")
    await until(lambda: not served.host.live)
    assert len({request_id for request_id, _ in served.host.aborted}) == 200
    assert (await served.service.stats_frame(blocks=False)).requests == []


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_while_its_prompt_waits_stops_its_request(door: Door, stream: bool) -> None:
    served = door.served
    served.host.reply = lambda request: None
    await leave_after(door, {"prompt": "a", "stream": stream}, 0)
    await until(lambda: len(served.host.aborted) == 1)
    assert served.host.live == {}


async def test_a_client_that_never_reads_is_dropped(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_generate, "_WRITE_TIMEOUT_S", 0.2)
    served = door.served
    served.host.reply = lambda request: None
    _, writer = await send(door, {"prompt": "a", "stream": True, "max_tokens": 2000})
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    await until(lambda: bool(served.host.submitted))
    request_id = served.host.submitted[0].request_id
    for _ in range(400):
        if request_id not in served.host.live:
            break
        served.host.produce(request_id, b"x" * 50_000)
        await asyncio.sleep(0.01)
    assert (request_id, None) in served.host.aborted
    writer.close()
    assert b'pagedd:request_errors_total{code="client_too_slow"' in served.service.metrics.render()


# What is not generation


async def test_health_is_live_and_ready_is_not_while_the_model_loads(served: Served) -> None:
    served.host.state, served.host.detail, served.host.progress = EngineState.LOADING, "weights", 0.43
    assert await served.get("/health") == (
        200,
        {"status": "live", "state": "loading", "detail": "loading, 43 % (weights)"},
    )
    async with served.http.get("http://localhost/ready") as response:
        assert response.status == 503
        assert response.headers["Retry-After"] == "1"
        assert "loading, 43 %" in await response.text()
    served.host.state = EngineState.READY
    assert await served.get("/ready") == (200, {"status": "ready"})


async def test_before_there_is_a_model_every_path_answers(socket_folder: Path) -> None:
    host = ScriptedHost(state=EngineState.STARTING, info=None, stats=None)
    async with serving(socket_folder, host, has_model=False) as served:
        assert (await served.get("/health"))[0] == 200
        assert (await served.get("/ready"))[0] == 503
        assert await served.get("/v1/models") == (200, {"object": "list", "data": []})
        assert (await served.get("/v1/models/default"))[0] == 503
        assert (await served.post("/v1/completions", {"prompt": "a"}))[0] == 503
        assert (await served.post("/tokenize", {"prompt": "a"}))[0] == 503
        async with served.http.get("http://localhost/metrics") as response:
            assert response.status == 200


async def test_a_driver_that_takes_its_time_holds_up_nobody_but_who_asks_for_its_figures(served: Served) -> None:
    asked, answers = threading.Event(), threading.Event()

    def figures() -> dict[str, float | None]:
        asked.set()
        assert answers.wait(WAIT_S)
        return {"gpu_power_watts": 35.5}

    served.service.metrics.machine_registry.register(TelemetryCollector(figures))

    async def read() -> str:
        async with served.http.get("http://localhost/metrics") as response:
            return await response.text()

    reading = asyncio.create_task(read())
    await until(asked.is_set)
    assert (await served.get("/health"))[0] == 200
    answers.set()
    text = await reading
    assert "pagedd:gpu_power_watts 35.5" in text
    assert "vllm:num_requests_running" in text


async def test_models_lists_the_served_one(served: Served) -> None:
    status, models = await served.get("/v1/models")
    assert (status, models["data"][0]["id"], models["data"][0]["max_model_len"]) == (200, "bytes", 2048)
    assert (await served.get("/v1/models/bytes"))[0] == 200
    status, answer = await served.get("/v1/models/gpt-4")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


async def test_tokenize_gives_the_ids_that_a_request_would_have(served: Served) -> None:
    assert await served.post("/tokenize", {"prompt": "hé"}) == (
        200,
        {"tokens": [104, 195, 169], "count": 3, "max_model_len": 2048},
    )
    _, chat = await served.post("/tokenize", CHAT)
    await served.post("/v1/chat/completions", CHAT)
    assert chat["tokens"] == served.host.submitted[0].prompt_token_ids
    assert await served.post("/detokenize", {"tokens": [104, 195, 169]}) == (200, {"prompt": "hé"})


@pytest.mark.parametrize(
    ("path", "body", "code", "field"),
    [
        ("/tokenize", {}, "missing_field", "prompt"),
        ("/tokenize", {"prompt": ""}, "empty_prompt", "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "invalid_value", "prompt"),
        ("/tokenize", {"messages": []}, "empty_messages", "messages"),
        ("/detokenize", {"tokens": [259]}, "token_out_of_vocabulary", "tokens"),
        ("/detokenize", {"tokens": "a"}, "invalid_type", "tokens"),
        ("/detokenize", {}, "missing_field", "tokens"),
        ("/v1/completions", {}, "missing_field", "prompt"),
        ("/v1/completions", [], "invalid_type", None),
        ("/v1/completions", b"", "malformed_message", None),
        ("/v1/completions", b"{", "malformed_message", None),
        ("/v1/completions", b"\x80\x04K\x01.", "malformed_message", None),
        ("/v1/completions", b"[" * 100_000, "invalid_type", None),
        ("/v1/completions", b'{"prompt": ' + b"[" * 100_000, "malformed_message", None),
        ("/v1/completions", b'{"prompt": "\xff"}', "malformed_message", None),
    ],
    ids=lambda value: repr(value)[:40],
)
async def test_bodies_that_are_wrong_are_refused_by_name(
    served: Served, path: str, body: Any, code: str, field: str | None
) -> None:
    status, answer = await served.post(path, body)
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, code, field)


async def test_a_body_that_is_too_large_is_refused(served: Served) -> None:
    status, answer = await served.post("/v1/completions", b" " * (MAX_MESSAGE_BYTES + 1))
    assert (status, answer["error"]["code"]) == (413, "message_too_large")
    assert (await served.get("/ready"))[0] == 200


async def test_an_unknown_field_is_ignored_and_said(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for path, body in [
        ("/v1/completions", {"prompt": [5], "max_tokens": 1, "temperatur": 0}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "usr": "u"}),
        ("/tokenize", {"prompt": "a", "promptt": ""}),
        ("/detokenize", {"tokens": [5], "token": 5}),
    ]:
        assert (await served.post(path, body))[0] == 200
    said = [record.getMessage() for record in caplog.records if "is not known here" in record.getMessage()]
    assert [line.split("'")[1] for line in said] == ["temperatur", "usr", "promptt", "token"]


async def test_an_unknown_path_or_method_is_an_error_object_too(served: Served) -> None:
    status, answer = await served.post("/v2/completions", {})
    assert (status, answer["error"]["code"]) == (404, "unknown_route")
    assert answer["error"]["message"] == "POST /v2/completions: there is no such path; /openapi.json lists them"
    async with served.http.get("http://localhost/v1/completions") as response:
        error = (await response.json())["error"]
        assert (response.status, error["code"], response.headers["Allow"]) == (405, "method_not_allowed", "POST")
        assert error["message"] == "GET /v1/completions: that path takes POST"


async def test_a_header_that_is_too_long_is_refused_and_the_server_goes_on(served: Served) -> None:
    with suppress(aiohttp.ClientError):
        async with served.http.get("http://localhost/ready", headers={"X-Long": "a" * 100_000}) as response:
            assert response.status == 400
    assert (await served.get("/ready"))[0] == 200


async def answer_to(door: Door, *parts: bytes) -> tuple[int, dict[str, Any]]:
    """Writes `parts` one after the other to a connection of its own; status and body of what comes back."""
    reader, writer = await door.connect()
    for part in parts:
        writer.write(part.replace(b"Host: x\r\n", door.head))
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
    writer.write(b"GET " + target + b" HTTP/1.1\r\n" + door.head + b"\r\n")
    answer = (await asyncio.wait_for(reader.read(), 10))[:12]  # to its end
    writer.close()
    assert answer[5:] in (b"", b"1.0 400", b"1.1 400")
    assert not [record for record in caplog.records if record.exc_info]
    assert (await door.served.get("/ready"))[0] == 200


# Who may call


async def test_the_socket_is_open_to_the_group_and_closed_to_others(served: Served) -> None:
    assert stat.S_IMODE(served.endpoints.http.stat().st_mode) == 0o660


@pytest.mark.parametrize("umask", [0o000, 0o077])
async def test_the_sockets_modes_do_not_depend_on_the_umask(socket_folder: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        async with serving(socket_folder) as served:
            modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in served.endpoints.directory.iterdir()}
    finally:
        os.umask(before)
    assert modes == {"http.sock": 0o660, "pagedd.sock": 0o660, "stats.sock": 0o660, "admin.sock": 0o600}


async def test_any_host_is_right_on_the_socket_and_no_page_is_told_that_it_may_read(served: Served) -> None:
    headers = {"Host": "evil.example", "Origin": "http://evil.example"}
    async with served.http.get("http://localhost/health", headers=headers) as response:
        assert response.status == 200
        assert not [name for name in response.headers if name.lower().startswith("access-control")]
    async with served.http.options("http://localhost/v1/completions", headers=headers) as response:
        assert response.status == 405


async def test_the_caller_is_who_the_kernel_says(served: Served) -> None:
    await served.post("/v1/completions", {"prompt": "a"})
    assert served.host.submitted[0].cache_extras == (("caller", f"uid:{os.geteuid()}"),)


@pytest.fixture
async def tcp(socket_folder: Path, free_port: int) -> AsyncIterator[tuple[Served, str]]:
    keys = socket_folder / "keys"
    keys.write_text("# ours\n\nfirst-key\nsecond-key\n")
    async with serving(socket_folder, http_port=free_port, api_key_file=keys) as running:
        yield running, f"http://127.0.0.1:{free_port}"


async def test_tcp_needs_a_key_and_each_key_has_a_cache_of_its_own(tcp: tuple[Served, str]) -> None:
    served, url = tcp
    async with aiohttp.ClientSession() as http:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic first-key"}):
            async with http.post(f"{url}/v1/completions", json={"prompt": "a"}, headers=headers) as response:
                assert response.status == 401
                assert (await response.json())["error"]["code"] == "unauthorized"
        for key in ("first-key", "second-key"):
            headers = {"Authorization": f"Bearer {key}"}
            async with http.post(f"{url}/v1/completions", json={"prompt": "a"}, headers=headers) as response:
                assert response.status == 200
        async with http.get(f"{url}/metrics") as response:
            assert response.status == 401
        async with http.get(f"{url}/health") as response:
            assert response.status == 200
    first, second = (request.cache_extras[0] for request in served.host.submitted)
    assert first[1].startswith("key:")
    assert first != second
    assert "first-key" not in first[1]


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost:1", ""])
async def test_tcp_refuses_a_page_that_was_sent_here_under_another_name(tcp: tuple[Served, str], host: str) -> None:
    _, url = tcp
    headers = {"Host": host, "Authorization": "Bearer first-key"}
    async with aiohttp.ClientSession() as http, http.get(f"{url}/v1/models", headers=headers) as response:
        assert response.status == 403


async def test_only_administrators_put_the_engine_to_sleep(tcp: tuple[Served, str]) -> None:
    served, url = tcp
    (served.endpoints.directory.parent / "keys").write_text("laptop first-key\nowner third-key admin\n")
    assert served.http_api.reload_keys(())
    async with aiohttp.ClientSession() as http:
        for key, status in (("first-key", 403), ("second-key", 401), ("third-key", 200)):
            headers = {"Authorization": f"Bearer {key}"}
            async with http.post(f"{url}/sleep", headers=headers) as response:
                assert response.status == status
            assert served.host.is_sleeping is (status == 200)
        async with http.post(f"{url}/wake_up", headers=headers) as response:
            assert response.status == 200
        mere_user = {"Authorization": "Bearer first-key"}
        async with http.post(f"{url}/load", json={"model": "x"}, headers=mere_user) as response:
            assert response.status == 403
    assert served.host.num_wakes == 1
    served.host.get_up()
    # On the Unix socket it is whom the kernel names, here the daemon's own user.
    assert (await served.post("/sleep", {}))[0] == 200


async def test_a_key_file_that_is_wrong_changes_no_key(
    tcp: tuple[Served, str],
) -> None:
    served, url = tcp
    (served.endpoints.directory.parent / "keys").write_text("a b c\n")
    with pytest.raises(PageddError, match="line 1: it is KEY"):
        served.http_api.reload_keys(())
    headers = {"Authorization": "Bearer second-key"}
    async with aiohttp.ClientSession() as http, http.get(f"{url}/v1/models", headers=headers) as response:
        assert response.status == 200


# The end


async def test_closing_ends_streams_with_an_error_event(socket_folder: Path) -> None:
    async with serving(socket_folder, ScriptedHost(reply=lambda request: None)) as served:
        reader, writer = await asyncio.open_unix_connection(str(served.endpoints.http))
        raw = msgspec.json.encode({"prompt": "a", "stream": True})
        writer.write(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(raw) + raw)
        await until(lambda: bool(served.host.submitted))
        served.host.produce(served.host.submitted[0].request_id, b"x")
        await reader.readuntil(b"data: ")
        await served.service.close()
        rest = await reader.read()
        writer.close()
    assert decode_events(b"data: " + rest)[-1]["error"]["code"] == "shutting_down"
