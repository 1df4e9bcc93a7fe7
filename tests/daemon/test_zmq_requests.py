"""A request over ZeroMQ: accepted, told token by token, cancelled by its own client, and ended once."""

import os

from pagedd.client.protocol import Accepted, Cancel, Chat, ChatMessage, Delta, Done, Failed, Ok, Sampling

from .byte_model import EOS
from .served import Served, prompt
from .waiting import until


async def test_a_request_is_accepted_streamed_and_done(served: Served) -> None:
    served.host.reply = lambda request: [*b"Hi", EOS]
    async with served.client() as client:
        await client.say(prompt())
        accepted = await client.hear()
        assert isinstance(accepted, Accepted)
        assert await client.hear() == Delta(id="a", text="H", token_ids=[72])
        assert await client.hear() == Delta(id="a", text="i", token_ids=[105])
        assert await client.hear() == Delta(id="a", text="", token_ids=[EOS], finish_reason="stop")
        done = await client.hear()
    assert isinstance(done, Done)
    assert (done.request_id, done.choices[0].text, done.choices[0].stop_reason) == (accepted.request_id, "Hi", EOS)


async def test_without_streaming_only_the_end_is_told(served: Served) -> None:
    async with served.client() as client:
        await client.say(prompt(stream=False))
        assert isinstance(await client.hear(), Accepted)
        assert isinstance(await client.hear(), Done)


async def test_a_chat_is_answered(served: Served) -> None:
    async with served.client() as client:
        await client.say(Chat(id="a", messages=[ChatMessage(role="user", content="hi")]))
        end = await client.hear_end()
    assert isinstance(end, Done)
    assert end.usage.prompt_tokens == 19


async def test_ids_belong_to_their_peer_and_are_unique_among_its_live_requests(served: Served) -> None:
    served.host.reply = lambda request: None
    async with served.client() as one, served.client() as other:
        await one.say(prompt())
        assert isinstance(await one.hear(), Accepted)
        await other.say(prompt())
        assert isinstance(await other.hear(), Accepted)
        await one.say(prompt())
        refused = await one.hear()
        assert isinstance(refused, Failed)
        assert (refused.code, refused.field) == ("duplicate_request", "id")
        served.host.produce(served.host.submitted[0].request_id, b"x", finish_reason="length")
        assert isinstance(await one.hear_end(), Done)
        await one.say(prompt())
        assert isinstance(await one.hear(), Accepted)


async def test_a_client_cancels_its_own_requests_and_no_other(served: Served) -> None:
    served.host.reply = lambda request: None
    async with served.client() as one, served.client() as other:
        await one.say(prompt())
        accepted = await one.hear()
        assert isinstance(accepted, Accepted)
        for target in ("a", accepted.request_id):
            await other.say(Cancel(id="c", target=target))
            refused = await other.hear()
            assert isinstance(refused, Failed)
            assert (refused.code, refused.field) == ("request_not_found", "target")
        served.host.produce(accepted.request_id, b"x")
        await one.hear()
        await one.say(Cancel(id="c", target="a"))
        end = await one.hear_end()
        assert isinstance(end, Done)
        assert (end.choices[0].text, end.choices[0].finish_reason) == ("x", "abort")
        assert await one.hear() == Ok(id="c")
    assert served.host.aborted == [(accepted.request_id, None)]


async def test_a_cancel_right_behind_its_request_ends_it(served: Served) -> None:
    served.host.reply = lambda request: None
    async with served.client() as client:
        await client.say(prompt(sampling=Sampling(n=2)))
        await client.say(Cancel(id="c", target="a"))
        end = await client.hear_end()
        assert isinstance(end, Done)
        assert [(choice.index, choice.text, choice.finish_reason) for choice in end.choices] == [
            (0, "", "abort"),
            (1, "", "abort"),
        ]
        assert await client.hear() == Ok(id="c")
    await until(lambda: not served.host.live)


async def test_the_caller_is_who_the_kernel_says(served: Served) -> None:
    async with served.client() as client:
        await client.say(prompt())
        await client.hear_end()
    assert served.host.submitted[0].cache_extras == (("caller", f"uid:{os.geteuid()}"),)
