"""Answers over HTTP, whole and as streams: their form, their faults, and clients that leave or do not read."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pagedd.daemon import http_generate
from pagedd.daemon.openai_responses import AnswerWriter

from .byte_model import EOS
from .http_door import Door
from .scripted_host import ScriptedHost
from .served import Served, decode_events, serving
from .waiting import until

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


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


async def test_a_fault_in_the_middle_of_a_stream_is_an_event_and_not_a_second_answer(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = AnswerWriter.chunk

    def broken(writer: AnswerWriter, number: int, delta: Any) -> bytes:
        if delta.text == "l":
            raise RuntimeError("scripted fault")
        return write(writer, number, delta)

    monkeypatch.setattr(AnswerWriter, "chunk", broken)
    first, second, error = await served.events("/v1/completions", {"prompt": "a", "stream": True})
    assert [first["choices"][0]["text"], second["choices"][0]["text"]] == ["H", "e"]
    assert error["error"]["code"] == "internal"
    await until(lambda: not served.host.live)


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


async def send(door: Door, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Asks for a completion over a connection of its own."""
    reader, writer = await door.connect()
    raw = msgspec.json.encode(body)
    writer.write(b"POST /v1/completions HTTP/1.1\r\n%bContent-Length: %d\r\n\r\n%b" % (door.head(), len(raw), raw))
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
