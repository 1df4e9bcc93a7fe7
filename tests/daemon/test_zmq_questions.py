"""Questions over ZeroMQ: each is answered under its id whatever the engine does, and no stranger learns a word."""

import asyncio

import pytest

from pagedd.client.errors import PageddError
from pagedd.client.protocol import Accepted, ClientMessage, Failed, Ping, Pong
from pagedd.client.questions import BlockDetail, EvictPrefix, GetBlock, GetPrefixes, GetStats, GetText, Stats
from pagedd.daemon import zmq_server
from pagedd.daemon.caller import Caller
from pagedd.daemon.engine_state import EngineState
from pagedd.engine.kv.prefix_tree import PrefixTree
from pagedd.engine.stats import BlockInfo

from .served import Served, prompt

CACHED = BlockInfo(
    state="cached",
    ref_count=0,
    owners=[],
    token_ids=list(b"secret"),
    digest=b"d" * 16,
    extras=(),
    num_hits=0,
    last_use_s=1.0,
)


async def test_a_ping_tells_the_state(served: Served) -> None:
    served.host.state = EngineState.LOADING
    async with served.client() as client:
        await client.say(Ping(id="p"))
        answer = await client.hear()
    assert isinstance(answer, Pong)
    assert (answer.id, answer.state) == ("p", "loading")
    assert answer.version


async def test_statistics_are_given_to_whoever_asks(served: Served) -> None:
    async with served.client() as client:
        await client.say(GetStats(id="s", blocks=True))
        answer = await client.hear()
    assert isinstance(answer, Stats)
    assert answer.frame.blocks is not None


QUESTIONS = [GetStats(id="q"), GetBlock(id="q", index=7), GetPrefixes(id="q"), GetText(id="q", target="r")]


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: type(question).__name__)
@pytest.mark.parametrize("socket_name", ["requests", "admin"])
async def test_every_question_is_answered_under_its_id_on_both_sockets(
    served: Served, question: ClientMessage, socket_name: str
) -> None:
    served.host.reply = lambda request: None
    served.host.blocks[7] = CACHED
    async with served.client() as client, served.client(getattr(served.endpoints, socket_name)) as asker:
        await client.say(prompt("secret"))
        accepted = await client.hear()
        assert isinstance(accepted, Accepted)
        if isinstance(question, GetText):
            question = GetText(id="q", target=accepted.request_id)
        await asker.say(question)
        answer = await asker.hear()
    assert not isinstance(answer, Failed)
    assert answer.id == "q"


async def test_a_stranger_is_answered_without_a_word_of_others(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    served.host.reply = lambda request: None
    served.host.blocks[7] = CACHED
    async with served.client() as client:
        await client.say(prompt("secret"))
        accepted = await client.hear()
        assert isinstance(accepted, Accepted)
        monkeypatch.setattr(zmq_server, "caller_of_socket", lambda connection: Caller(uid=100_001))
        async with served.client() as stranger:
            await stranger.say(GetBlock(id="b", index=7))
            block = await stranger.hear()
            assert isinstance(block, BlockDetail)
            assert (block.text, block.token_ids) == (None, [])
            await stranger.say(GetText(id="t", target=accepted.request_id))
            refused = await stranger.hear()
            assert isinstance(refused, Failed)
            assert (refused.id, refused.code) == ("t", "forbidden")
            await stranger.say(EvictPrefix(id="e", digest="00"))
            refused = await stranger.hear()
            assert isinstance(refused, Failed)
            assert (refused.id, refused.code) == ("e", "forbidden")


async def test_a_question_whose_answer_breaks_is_answered(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(limit: int) -> PrefixTree:
        raise ZeroDivisionError

    monkeypatch.setattr(served.host, "prefixes", broken)
    async with served.client() as client:
        await client.say(GetPrefixes(id="q"))
        answer = await client.hear()
    assert isinstance(answer, Failed)
    assert (answer.id, answer.code) == ("q", "internal")


async def test_a_question_that_waits_when_the_daemon_stops_is_answered(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, never = asyncio.Event(), asyncio.Event()

    async def hanging(limit: int) -> PrefixTree:
        asked.set()
        await never.wait()
        raise AssertionError

    monkeypatch.setattr(served.host, "prefixes", hanging)
    async with served.client() as client:
        await client.say(GetPrefixes(id="q"))
        await asked.wait()
        await served.zmq_api.close()
        answer = await client.hear()
    assert isinstance(answer, Failed)
    assert (answer.id, answer.code) == ("q", "shutting_down")


async def test_questions_wait_for_the_engine_up_to_a_limit_and_die_with_it(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def waits(index: int) -> None:
        await answer

    monkeypatch.setattr(served.host, "block", waits)
    async with served.client() as client:
        for number in range(65):
            await client.say(GetBlock(id=str(number), index=0))
        refused = await client.hear()
        assert isinstance(refused, Failed)
        assert (refused.id, refused.code) == ("64", "queue_full")
        answer.set_exception(PageddError("engine_died", "it ended"))
        died = [await client.hear() for _ in range(64)]
    assert {message.code for message in died if isinstance(message, Failed)} == {"engine_died"}
    assert sorted(int(message.id) for message in died) == list(range(64))
    assert [event.reason.split(":")[0] for event in served.service.events.newest()][1:] == ["queue_full"]
