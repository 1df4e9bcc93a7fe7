"""The official `openai` client against the HTTP socket, in the ways that its users use it."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import openai
import pytest

from .byte_model import EOS
from .served import Served, serving
from .waiting import until


@pytest.fixture
async def served(socket_folder: Path) -> AsyncIterator[Served]:
    async with serving(socket_folder) as running:
        running.host.reply = lambda request: [*b"Hi there", EOS]
        yield running


@pytest.fixture
async def client(served: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    transport = httpx2.AsyncHTTPTransport(uds=str(served.endpoints.http))
    async with httpx2.AsyncClient(transport=transport) as http:
        yield openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="unused", http_client=http, max_retries=0)


async def test_a_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="default", messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    )
    assert answer.choices[0].message.content == "Hi there"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 9
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


async def test_a_streamed_chat_with_usage(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="bytes",
        messages=[{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hi there"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.usage is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]


async def test_a_completion_with_everything_that_can_be_asked_for(client: openai.AsyncOpenAI, served: Served) -> None:
    answer = await client.completions.create(
        model="default",
        prompt=["a", "b"],
        max_tokens=2,
        n=2,
        temperature=0.5,
        top_p=0.9,
        seed=42,
        logprobs=1,
        stop=["zzz"],
        logit_bias={"97": 5},
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        user="somebody",
        extra_body={
            "top_k": 5,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "ignore_eos": True,
            "min_tokens": 1,
            "priority": 7,
        },
    )
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "Hi"), (1, "Hi"), (2, "Hi"), (3, "Hi")]
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == ["H", "i"]
    request = served.host.submitted[0]
    params = request.params
    assert (request.priority, params.n, params.temperature, params.top_k, params.top_p) == (7, 2, 0.5, 5, 0.9)
    assert (params.min_p, params.repetition_penalty, params.seed, params.min_tokens) == (0.1, 1.1, 42, 1)
    assert (params.presence_penalty, params.frequency_penalty, params.logit_bias) == (0.5, -0.5, {97: 5.0})
    assert (params.num_logprobs, params.stop_token_ids) == (1, ())


async def test_a_streamed_completion(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(model="default", prompt=[97, 98], max_tokens=5, stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hi th"
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_models_can_be_listed_and_looked_up(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["bytes"]
    assert (await client.models.retrieve("bytes")).owned_by == "pagedd"


async def test_refusals_are_the_clients_own_exceptions(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.completions.create(model="gpt-4", prompt="a")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        await client.completions.create(model="default", prompt="a", top_p=2)
    assert (wrong.value.code, wrong.value.param) == ("invalid_value", "top_p")


async def test_a_fault_in_the_middle_of_a_stream_is_an_exception(client: openai.AsyncOpenAI, served: Served) -> None:
    host = served.host
    host.reply = lambda request: None
    asked = asyncio.create_task(client.completions.create(model="default", prompt="a", stream=True))
    await until(lambda: bool(host.submitted))
    request_id = host.submitted[0].request_id
    host.produce(request_id, b"x")
    stream = await asked
    host.produce(request_id, [], finish_reason="error", error_code="nan_logits", error_message="not finite")
    with pytest.raises(openai.APIError, match="not finite"):
        _ = [chunk async for chunk in stream]
