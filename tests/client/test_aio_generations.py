"""Generations of the asyncio client: read, awaited, cancelled and refused."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pagedd.client import AsyncClient, PageddError, protocol
from pagedd.client.options import SamplingOptions
from pagedd.client.protocol import Accepted, Cancel, Chat, ChatMessage, Delta, Done, Failed, Generate, Sampling

from .fake_daemon import FakeDaemon


def test_the_keyword_arguments_are_the_fields_of_sampling() -> None:
    assert set(SamplingOptions.__annotations__) == set(Sampling.__struct_fields__)


async def test_iterating_gives_the_deltas_and_then_the_whole_answer(daemon: FakeDaemon, directory: Path) -> None:
    async with AsyncClient(directory) as client:
        generation = client.generate("count", max_tokens=3, temperature=0, stop="\n")
        texts = [delta.text async for delta in generation]
        done = await generation
    assert texts == ["one", " two", " three"]
    assert done.choices[0].text == "one two three"
    assert done.usage.total_tokens == 8
    assert generation.request_id == "r1"
    asked = daemon.hear(Generate)
    assert (asked.prompt, asked.stream) == ("count", True)
    assert asked.sampling == Sampling(max_tokens=3, temperature=0, stop=["\n"])


async def test_awaiting_gives_the_whole_answer_and_asks_for_no_stream(daemon: FakeDaemon, directory: Path) -> None:
    async with AsyncClient(directory) as client:
        done = await client.generate(prompt_token_ids=(1, 2), priority=5, cache_salt="s", parse_special=True)
    assert isinstance(done, Done)
    asked = daemon.hear(Generate)
    assert (asked.prompt, asked.prompt_token_ids, asked.stream) == (None, [1, 2], False)
    assert (asked.priority, asked.cache_salt, asked.parse_special) == (5, "s", True)


async def test_a_chat_takes_dicts_and_messages(daemon: FakeDaemon, directory: Path) -> None:
    async with AsyncClient(directory) as client:
        await client.chat([{"role": "system", "content": "Be brief."}, ChatMessage(role="user", content="Hi")], n=2)
        with pytest.raises(PageddError, match=r"invalid_type: messages: .*content"):
            client.chat([{"role": "user"}])
    asked = daemon.hear(Chat)
    assert asked.messages == [
        ChatMessage(role="system", content="Be brief."),
        ChatMessage(role="user", content="Hi"),
    ]
    assert asked.sampling.n == 2


async def test_an_unknown_sampling_name_is_a_type_error_at_the_call(directory: Path) -> None:
    with pytest.raises(TypeError, match="temprature"):
        AsyncClient(directory).generate("x", temprature=1)  # type: ignore[call-arg]


async def test_a_number_that_no_message_can_carry_is_an_invalid_value(daemon: FakeDaemon, directory: Path) -> None:
    async with AsyncClient(directory) as client:
        for awaitable in (client.generate("a", seed=10**20), client.set_priority("r1", -(10**20))):
            with pytest.raises(PageddError) as refused:
                await awaitable
            assert refused.value.code == "invalid_value"
        assert (await client.generate("b", seed=1)).choices[0].text == "one two three"


async def test_many_requests_share_a_connection_and_each_gets_its_own(daemon: FakeDaemon, directory: Path) -> None:
    daemon.answer = lambda message: [
        Accepted(id=message.id, request_id="r" + message.id),
        Delta(id=message.id, text=message.prompt),
        *daemon.default_answer(message)[-1:],
    ]

    async def ask(client: AsyncClient, prompt: str) -> str:
        return "".join([delta.text async for delta in client.generate(prompt)])

    async with AsyncClient(directory) as client:
        answers = await asyncio.gather(*(ask(client, f"p{i}") for i in range(50)))
    assert answers == [f"p{i}" for i in range(50)]


async def test_a_refusal_is_an_exception_with_code_message_and_field(daemon: FakeDaemon, directory: Path) -> None:
    daemon.answer = lambda message: [
        Failed(id=message.id, code="prompt_too_long", message="9210 tokens, limit 8192", field="prompt")
    ]
    async with AsyncClient(directory) as client:
        with pytest.raises(PageddError) as refusal:
            await client.generate("x")
        assert (refusal.value.code, refusal.value.field) == ("prompt_too_long", "prompt")
        assert str(refusal.value) == "prompt_too_long: 9210 tokens, limit 8192"
        with pytest.raises(PageddError, match="prompt_too_long"):
            await client.stats()


async def test_leaving_the_iteration_early_cancels_the_request(daemon: FakeDaemon, directory: Path) -> None:
    daemon.answer = lambda message: [Delta(id=message.id, text="a")] if isinstance(message, Generate) else []
    async with AsyncClient(directory) as client:
        async for _ in client.generate("x"):
            break
        asked = daemon.hear(Generate)
        assert (await asyncio.to_thread(daemon.hear, Cancel)).target == asked.id


@pytest.mark.parametrize("stream", [True, False])
async def test_cancelling_the_task_that_waits_cancels_the_request(
    daemon: FakeDaemon, directory: Path, stream: bool
) -> None:
    daemon.answer = lambda message: [Accepted(id=message.id, request_id="r9")] if isinstance(message, Generate) else []

    async def read(client: AsyncClient) -> None:
        if stream:
            async for _ in client.generate("x"):
                pass
        else:
            await client.generate("x")

    async with AsyncClient(directory) as client:
        reading = asyncio.create_task(read(client))
        asked = await asyncio.to_thread(daemon.hear, Generate)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert (await asyncio.to_thread(daemon.hear, Cancel)).target == asked.id


async def test_a_timeout_around_a_generation_cancels_it(daemon: FakeDaemon, directory: Path) -> None:
    loop, limit = asyncio.get_running_loop(), asyncio.timeout(None)

    def answer(message: Any) -> list[Any]:
        if isinstance(message, Generate):
            loop.call_soon_threadsafe(limit.reschedule, loop.time())
        return []

    daemon.answer = answer
    async with AsyncClient(directory) as client:
        with pytest.raises(TimeoutError):
            async with limit:
                await client.generate("x")
        await asyncio.to_thread(daemon.hear, Cancel)


async def test_closing_the_client_cancels_no_question(daemon: FakeDaemon, directory: Path) -> None:
    daemon.answer = lambda message: []
    client = AsyncClient(directory)
    asking = asyncio.ensure_future(client.prefixes(10))
    running = asyncio.ensure_future(client.generate("x").result())
    request = await asyncio.to_thread(daemon.hear, Generate)
    await client.close()
    cancels = [await asyncio.to_thread(daemon.hear, Cancel)]
    await asyncio.gather(asking, running, return_exceptions=True)
    cancels += [message for _, message in daemon.heard.queue if isinstance(message, Cancel)]
    assert [cancel.target for cancel in cancels if isinstance(cancel, Cancel)] == [request.id]


async def test_closing_the_client_cancels_what_it_has_running(daemon: FakeDaemon, directory: Path) -> None:
    daemon.answer = lambda message: []
    client = AsyncClient(directory)
    waiting = asyncio.ensure_future(client.generate("x").result())
    asked = await asyncio.to_thread(daemon.hear, Generate)
    await client.close()
    assert (await asyncio.to_thread(daemon.hear, Cancel)).target == asked.id
    with pytest.raises(PageddError, match="closed"):
        await waiting


async def test_what_comes_late_for_a_cancelled_request_is_dropped(daemon: FakeDaemon, directory: Path) -> None:
    daemon.answer = lambda message: [Delta(id=message.id, text="a")] if isinstance(message, Generate) else []
    async with AsyncClient(directory) as client:
        generation = client.generate("x")
        async for _ in generation:
            break
        await asyncio.to_thread(daemon.hear, Cancel)
        daemon.say(Delta(id=generation.id, text="late"))
        daemon.answer = daemon.default_answer
        assert (await client.generate("y")).choices[0].text == "one two three"


async def test_a_generation_can_be_read_once(daemon: FakeDaemon, directory: Path) -> None:
    async with AsyncClient(directory) as client:
        generation = client.generate("x")
        first = await generation
        assert await generation is first
        with pytest.raises(RuntimeError, match="read once"):
            async for _ in generation:
                pass


async def test_cancel_ends_an_own_request_over_the_request_socket(daemon: FakeDaemon, directory: Path) -> None:
    from_start: list[str] = []

    def answer(message: Any) -> list[Any]:
        if isinstance(message, Generate):
            from_start.append(message.id)
            return [Accepted(id=message.id, request_id="r7"), Delta(id=message.id, text="a")]
        aborted = daemon.default_answer(Generate(id=message.target, stream=False))[-1]
        return [*daemon.default_answer(message), aborted]

    daemon.answer = answer
    async with AsyncClient(directory) as client:
        for name in ("by the generation", "by the client with it", "by its request_id"):
            generation = client.generate(name)
            async for _ in generation:
                match name:
                    case "by the generation":
                        await generation.cancel()
                    case "by the client with it":
                        await client.cancel(generation)
                    case _:
                        await client.cancel("r7")
            assert (await generation).choices
    assert [daemon.hear(Cancel).target for _ in range(3)] == from_start


async def test_cancelling_a_generation_that_is_not_running_says_so(daemon: FakeDaemon, directory: Path) -> None:
    async with AsyncClient(directory) as client:
        with pytest.raises(PageddError, match="request_not_found"):
            await client.generate("x").cancel()


async def test_a_prompt_larger_than_a_message_is_refused_before_it_is_sent(daemon: FakeDaemon, directory: Path) -> None:
    async with AsyncClient(directory) as client:
        with pytest.raises(PageddError, match=r"message_too_large: \d+ bytes, limit 8388608"):
            await client.generate("x" * protocol.MAX_MESSAGE_BYTES)
        assert (await client.ping()).state == "ready"


async def test_a_refusal_for_a_quota_says_when_to_come_again(daemon: FakeDaemon, directory: Path) -> None:
    daemon.answer = lambda message: [Failed(id=message.id, code="over_quota", message="later", retry_after_s=2.5)]
    async with AsyncClient(directory) as client:
        with pytest.raises(PageddError) as refused:
            await client.generate("x").result()
    assert (refused.value.code, refused.value.retry_after_s) == ("over_quota", 2.5)
