"""Every limit at the door, over every transport: the same input has the same code and names the same field."""

import math
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from pagedd.client.errors import ERROR_KINDS
from pagedd.client.protocol import PROTOCOL_VERSION, Done, Failed
from pagedd.daemon.engine_state import EngineState
from pagedd.daemon.limits import LIMITS

from .byte_model import CONTEXT, VOCAB_SIZE
from .scripted_host import ScriptedHost, engine_info
from .served import Served, serving

SAMPLING = {
    "max_tokens", "min_tokens", "n", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "logit_bias", "logprobs", "seed", "stop", "stop_token_ids", "ignore_eos",
}  # fmt: skip
LONG = [1] * 11_680
KEY = "first-key"


@pytest.fixture
async def served(socket_folder: Path, free_port: int) -> AsyncIterator[Served]:
    keys = socket_folder / "keys"
    keys.write_text(KEY)
    async with serving(socket_folder, max_prompts_per_request=128, http_port=free_port, api_key_file=keys) as running:
        yield replace(running, tcp_port=free_port)


async def over_tcp(served: Served, fields: dict[str, Any]) -> tuple[str | None, str | None]:
    """Like `over_http`."""
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}) as http:
        at_port = replace(served, http=http, url=f"http://localhost:{served.tcp_port}")
        return await over_http(at_port, fields)


async def over_http(served: Served, fields: dict[str, Any]) -> tuple[str | None, str | None]:
    """Code and field of the refusal, or (None, None)."""
    body = dict(fields)
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    if "prompt_token_ids" in body:
        body["prompt"] = body.pop("prompt_token_ids")
    elif path == "/v1/completions":
        body.setdefault("prompt", "ab")
    status, answer = await served.post(path, body)
    if status == 200:
        return None, None
    error = answer["error"]
    assert status == ERROR_KINDS[error["code"]].http_status
    assert error["message"]
    return error["code"], error["param"]


async def over_zmq(served: Served, fields: dict[str, Any]) -> tuple[str | None, str | None]:
    kind = "chat" if "messages" in fields else "generate"
    message: dict[str, Any] = {"type": kind, "id": "x", "sampling": {}}
    for name, value in fields.items():
        (message["sampling"] if name in SAMPLING else message)[name] = value
    if kind == "generate" and "prompt_token_ids" not in fields:
        message.setdefault("prompt", "ab")
    async with served.client() as client:
        await client.socket.send_multipart([PROTOCOL_VERSION, msgspec.msgpack.encode(message)])
        end = await client.hear_end()
    assert end.id == "x"
    if isinstance(end, Done):
        return None, None
    assert isinstance(end, Failed)
    return end.code, end.field


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    # Empty prompts
    ({"prompt": ""}, "empty_prompt", "prompt"),
    ({"prompt_token_ids": []}, "empty_prompt", "prompt"),
    ({"messages": []}, "empty_messages", "messages"),
    ({"messages": [{"role": "user", "content": ""}]}, "invalid_value", "messages.content"),
    ({"messages": [{"role": "user", "content": None}]}, "invalid_type", "messages.content"),
    ({"messages": [{"role": "", "content": "a"}]}, "invalid_value", "messages.role"),
    ({"messages": [{"role": "user"}]}, "missing_field", "messages.content"),
    ({"messages": [{"content": "a"}]}, "missing_field", "messages.role"),
    ({"messages": [{"role": "user", "content": "x"}] * 16_385}, "invalid_value", "messages"),
    ({"messages": "hello"}, "invalid_type", "messages"),
    ({"messages": [{"role": "cursed", "content": "a"}]}, "template_error", "messages"),
    # Lengths
    ({"prompt_token_ids": [1] * 8, "max_tokens": 2045}, "prompt_too_long", "prompt"),
    ({"prompt_token_ids": LONG}, "prompt_too_long", "prompt"),
    ({"prompt_token_ids": [1] * CONTEXT}, "prompt_too_long", "prompt"),
    ({"prompt": "a" * 11_680}, "prompt_too_long", "prompt"),
    ({"messages": [{"role": "user", "content": "a" * 3000}]}, "prompt_too_long", "messages"),
    ({"max_tokens": 2**31 - 1}, "prompt_too_long", "prompt"),
    ({"max_tokens": 2**31}, "invalid_value", "max_tokens"),
    # Token ids
    ({"prompt_token_ids": [1, VOCAB_SIZE]}, "token_out_of_vocabulary", "prompt"),
    ({"prompt_token_ids": [-1]}, "token_out_of_vocabulary", "prompt"),
    ({"stop_token_ids": [191_222]}, "token_out_of_vocabulary", "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "token_out_of_vocabulary", "stop_token_ids"),
    ({"stop_token_ids": ["1"]}, "invalid_type", "stop_token_ids"),
    ({"stop_token_ids": [1] * 10_000}, "invalid_value", "stop_token_ids"),
    ({"logit_bias": {"191222": 1}}, "token_out_of_vocabulary", "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "token_out_of_vocabulary", "logit_bias"),
    ({"logit_bias": {"abc": 1}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"": 1}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(10_000)}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"1": 101}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"1": "1"}}, "invalid_type", "logit_bias"),
    # Numbers
    ({"top_k": 0.5}, "invalid_type", "top_k"),
    ({"top_k": -2}, "invalid_value", "top_k"),
    ({"top_k": 2**64 - 1}, "invalid_value", "top_k"),
    ({"top_k": "3"}, "invalid_type", "top_k"),
    ({"top_k": True}, "invalid_type", "top_k"),
    ({"top_p": 0}, "invalid_value", "top_p"),
    ({"top_p": 1.1}, "invalid_value", "top_p"),
    ({"top_p": "0.9"}, "invalid_type", "top_p"),
    ({"temperature": -1}, "invalid_value", "temperature"),
    ({"temperature": 101}, "invalid_value", "temperature"),
    ({"temperature": "1"}, "invalid_type", "temperature"),
    ({"min_p": -0.1}, "invalid_value", "min_p"),
    ({"min_p": 1.1}, "invalid_value", "min_p"),
    ({"repetition_penalty": 0}, "invalid_value", "repetition_penalty"),
    ({"repetition_penalty": 10.1}, "invalid_value", "repetition_penalty"),
    ({"presence_penalty": 2.1}, "invalid_value", "presence_penalty"),
    ({"frequency_penalty": -2.1}, "invalid_value", "frequency_penalty"),
    ({"logprobs": 21}, "invalid_value", "logprobs"),
    ({"logprobs": -1}, "invalid_value", "logprobs"),
    ({"logprobs": 20, "max_tokens": 2000, "n": 7}, "invalid_value", "logprobs"),
    ({"logprobs": 20, "min_tokens": 2000, "n": 7}, "invalid_value", "logprobs"),
    ({"seed": 2**63}, "invalid_value", "seed"),
    ({"seed": 1.5}, "invalid_type", "seed"),
    ({"max_tokens": 0}, "invalid_value", "max_tokens"),
    ({"max_tokens": -1}, "invalid_value", "max_tokens"),
    ({"min_tokens": -1}, "invalid_value", "min_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "invalid_value", "min_tokens"),
    ({"priority": 101}, "invalid_value", "priority"),
    ({"priority": -101}, "invalid_value", "priority"),
    ({"priority": 10**9}, "invalid_value", "priority"),
    ({"priority": 1.5}, "invalid_type", "priority"),
    ({"priority": "high"}, "invalid_type", "priority"),
    # How many
    ({"n": 0}, "invalid_value", "n"),
    ({"n": -1}, "invalid_value", "n"),
    ({"n": 129}, "invalid_value", "n"),
    ({"n": 100_000}, "invalid_value", "n"),
    # Texts
    ({"stop": [""]}, "invalid_value", "stop"),
    ({"stop": ["a"] * 17}, "invalid_value", "stop"),
    ({"stop": ["a" * 257]}, "invalid_value", "stop"),
    ({"stop": [1]}, "invalid_type", "stop"),
    ({"cache_salt": ""}, "invalid_value", "cache_salt"),
    ({"cache_salt": "a" * 257}, "invalid_value", "cache_salt"),
    ({"cache_salt": 1}, "invalid_type", "cache_salt"),
    ({"prompt": 5}, "invalid_type", "prompt"),
    ({"model": "gpt-4"}, "model_not_found", "model"),
    ({"model": 4}, "invalid_type", "model"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "code", "field"), REFUSED, ids=lambda value: repr(value)[:60])
async def test_what_is_out_of_range_is_refused_by_name_over_every_transport(
    served: Served, fields: dict[str, Any], code: str, field: str
) -> None:
    assert await over_http(served, fields) == (code, field)
    assert await over_tcp(served, fields) == (code, field)
    zmq_field = "prompt_token_ids" if field == "prompt" and "prompt_token_ids" in fields else field
    assert await over_zmq(served, fields) == (code, zmq_field)
    assert served.host.submitted == []


TAKEN: list[dict[str, Any]] = [
    {"top_k": -1}, {"top_k": 0}, {"top_k": 1}, {"top_k": 10**9}, {"top_p": 1}, {"top_p": 0.001}, {"min_p": 0},
    {"min_p": 1},
    {"temperature": 0}, {"temperature": 2.5}, {"temperature": 1e-300}, {"repetition_penalty": 0.001},
    {"repetition_penalty": 10}, {"presence_penalty": -2}, {"frequency_penalty": 2}, {"n": 3}, {"n": 128},
    {"seed": -(2**63)}, {"seed": 2**63 - 1}, {"priority": -100}, {"priority": 100}, {"stop": []},
    {"stop": ["z" * 256] * 16}, {"logprobs": 0}, {"logprobs": 20}, {"stop_token_ids": [0, VOCAB_SIZE - 1]},
    {"logit_bias": {"0": -100, str(VOCAB_SIZE - 1): 100}}, {"logit_bias": {}}, {"min_tokens": 11, "max_tokens": 11},
    {"cache_salt": "s" * 256}, {"model": "default"}, {"model": "bytes"}, {"prompt_token_ids": [0, VOCAB_SIZE - 1]},
    {"prompt_token_ids": [1] * 8, "max_tokens": CONTEXT - 8}, {"prompt_token_ids": [1] * (CONTEXT - 1)},
    {"unknown_field": {"of": "a later client"}},
]  # fmt: skip


@pytest.mark.parametrize("fields", TAKEN, ids=lambda value: repr(value)[:60])
async def test_the_ends_of_every_range_are_inside_it(served: Served, fields: dict[str, Any]) -> None:
    if "logprobs" in fields:
        served.host.reply = lambda request: [97]
    for over in (over_http, over_tcp, over_zmq):
        assert await over(served, fields) == (None, None)
    assert len(served.host.submitted) == 3


def test_every_limit_of_the_table_is_met_in_these_tests() -> None:
    fields_met = {field for _, code, field in REFUSED if code in ("invalid_value", "empty_messages")}
    assert fields_met >= set(LIMITS)


async def test_a_refused_length_says_context_prompt_and_request(served: Served) -> None:
    _, answer = await served.post("/v1/completions", {"prompt": [1] * 8, "max_tokens": 2045})
    assert answer["error"]["message"] == (
        "prompt 8 + output 2045 = 2053 tokens, context 2048; shorten the prompt or lower max_tokens"
    )


async def test_a_text_that_cannot_fit_however_it_is_tokenized_is_refused_before_it_is(served: Served) -> None:
    text = "a" * 30_000  # the longest token, <|endoftext|>, has 13 characters
    for body in ({"prompt": text}, {"messages": [{"role": "user", "content": text}]}):
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        _, answer = await served.post(path, body)
        assert answer["error"]["code"] == "prompt_too_long"
        assert "prompt of 30000 characters, at least 2308 tokens, context 2048" in answer["error"]["message"]
        status, answer = await served.post("/tokenize", body)
        assert (status, answer["error"]["code"]) == (400, "prompt_too_long")


async def test_what_the_pool_can_never_hold_is_refused_with_its_size(socket_folder: Path) -> None:
    host = ScriptedHost(info=engine_info(max_request_tokens=800, num_blocks=50, block_size=16))
    async with serving(socket_folder, host) as served:
        _, answer = await served.post("/v1/completions", {"prompt": [1] * 1002})
        assert answer["error"]["code"] == "exceeds_kv_pool"
        assert (
            "prompt 1002 + output 1 = 1003 tokens, the KV pool holds 800 (50 blocks of 16)"
            in answer["error"]["message"]
        )
        assert await over_zmq(served, {"prompt_token_ids": [1] * 500, "max_tokens": 1000}) == (
            "exceeds_kv_pool",
            "prompt_token_ids",
        )
        status, _ = await served.post("/v1/completions", {"prompt": "hi"})
        assert status == 200
        _, models = await served.get("/v1/models")
        assert models["data"][0]["max_model_len"] == 800


@pytest.mark.parametrize(("settings", "length"), [({}, 2048), ({"max_model_len": 300}, 300)])
async def test_before_there_is_an_engine_the_longest_request_is_what_model_and_settings_allow(
    socket_folder: Path, settings: dict[str, int], length: int
) -> None:
    host = ScriptedHost()
    host.info = None
    async with serving(socket_folder, host, **settings) as served:
        _, models = await served.get("/v1/models")
        assert models["data"][0]["max_model_len"] == length


async def test_numbers_that_are_not_finite_are_refused(served: Served) -> None:
    for value in (math.nan, math.inf, -math.inf):
        for field in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            assert await over_zmq(served, {field: value}) == ("invalid_value", field)
        assert await over_zmq(served, {"logit_bias": {"1": value}}) == ("invalid_value", "logit_bias")
    # JSON has no such numbers.
    for number in (b"NaN", b"Infinity"):
        status, answer = await served.post("/v1/completions", b'{"prompt": "a", "top_p": %b}' % number)
        assert (status, answer["error"]["code"]) == (400, "malformed_message")
    status, answer = await served.post("/v1/completions", b'{"prompt": "a", "top_p": 1e999}')
    assert (status, answer["error"]["param"]) == (400, "top_p")


@pytest.mark.parametrize("digits", [20, 400, 5000])
@pytest.mark.parametrize("field", ["seed", "max_tokens", "top_k", "n", "priority", "temperature", "logprobs"])
async def test_an_integer_of_any_length_is_refused_and_not_computed_with(
    served: Served, field: str, digits: int
) -> None:
    for sign in (b"", b"-"):
        raw = b'{"prompt": "a", "%b": %b%b}' % (field.encode(), sign, b"9" * digits)
        status, answer = await served.post("/v1/completions", raw)
        assert status == 400
        assert answer["error"]["code"] in ("invalid_value", "invalid_type", "malformed_message")
        assert len(answer["error"]["message"]) < 300


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ([], "empty_prompt"),
        ([""], "empty_prompt"),
        ([[]], "empty_prompt"),
        (["a", ""], "empty_prompt"),
        ([[1], []], "empty_prompt"),
        (["a"] * 5000, "too_many_prompts"),
        (["a", 1], "invalid_type"),
        ([1, "a"], "invalid_type"),
        ([[1], "a"], "invalid_type"),
        ([[1, None]], "invalid_type"),
        ([1.5], "invalid_type"),
        ([True], "invalid_type"),
        ({"text": "a"}, "invalid_type"),
        (None, "invalid_type"),
        (["a", [1] * 5000], "invalid_type"),
        ([[1], [1] * 5000], "prompt_too_long"),
    ],
    ids=lambda value: repr(value)[:40],
)
async def test_one_bad_prompt_among_many_refuses_them_all(served: Served, prompt: Any, code: str) -> None:
    assert await over_http(served, {"prompt": prompt}) == (code, "prompt")
    assert await over_tcp(served, {"prompt": prompt}) == (code, "prompt")
    assert served.host.submitted == []


async def test_prompts_times_choices_have_a_limit(served: Served) -> None:
    assert await over_http(served, {"prompt": ["a"] * 2, "n": 64}) == (None, None)
    assert await over_http(served, {"prompt": ["a"] * 2, "n": 65}) == ("too_many_prompts", "prompt")
    assert await over_http(served, {"prompt": [""] * 129}) == ("too_many_prompts", "prompt")


async def test_all_prompts_of_a_request_have_one_limit_of_log_probabilities(served: Served) -> None:
    asked = {"max_tokens": 2000, "logprobs": 20}
    assert await over_http(served, {"prompt": ["a"] * 6, **asked}) == (None, None)
    assert await over_http(served, {"prompt": ["a"] * 7, **asked}) == ("invalid_value", "logprobs")
    assert await over_http(served, {"prompt": ["a"] * 128, **asked, "logprobs": 0}) == (None, None)


async def test_three_choices_are_three(served: Served) -> None:
    _, answer = await served.post("/v1/completions", {"prompt": "a", "n": 3})
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]


async def test_a_queue_that_is_full_refuses_over_both_and_says_when_to_come_back(socket_folder: Path) -> None:
    host = ScriptedHost(reply=lambda request: None)
    async with serving(socket_folder, host, max_num_seqs=1, max_queued_requests=1) as served, served.client() as client:
        await client.socket.send_multipart(
            [
                PROTOCOL_VERSION,
                msgspec.msgpack.encode({"type": "generate", "id": "x", "prompt": "a", "sampling": {"n": 2}}),
            ]
        )
        await client.hear()
        async with served.http.post("http://localhost/v1/completions", json={"prompt": "a"}) as response:
            assert response.status == 429
            assert re.fullmatch(r"[1-9]\d*", response.headers["Retry-After"])
        assert await over_zmq(served, {}) == ("queue_full", None)
        status, _ = await served.get("/health")
        assert status == 200


@pytest.mark.parametrize(
    ("state", "code"),
    [
        (EngineState.LOADING, "engine_loading"),
        (EngineState.RESTARTING, "engine_died"),
        (EngineState.FAILED, "engine_failed"),
        (EngineState.STALLED, "engine_stalled"),
        (EngineState.STOPPED, "shutting_down"),
    ],
)
async def test_without_an_engine_all_refuse_with_503(served: Served, state: EngineState, code: str) -> None:
    served.host.state = state
    for over in (over_http, over_tcp, over_zmq):
        assert await over(served, {}) == (code, None)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a", "model": "x" * 100_000},
        {"messages": [{"role": "user", "content": [{"type": "x" * 100_000}]}]},
        {"messages": [{"role": "x" * 100_000, "content": "a"}]},
        {"prompt": "a", "logit_bias": {"x" * 100_000: 1}},
        {"prompt": "a", "stop": "x" * 100_000},
        {"prompt": "a", "cache_salt": "x" * 100_000},
    ],
    ids=lambda body: ",".join(body),
)
async def test_a_refusal_does_not_send_a_large_value_back(served: Served, body: dict[str, Any]) -> None:
    status, answer = await served.post("/v1/chat/completions" if "messages" in body else "/v1/completions", body)
    assert status in (400, 404)
    assert len(answer["error"]["message"]) < 1000
