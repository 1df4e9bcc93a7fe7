"""The ZeroMQ sockets, with a scripted engine: requests, bad input, clients that leave and clients that do not read."""

import asyncio
import logging
import os
import pickle
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop
import zmq

from pagedd.client.endpoints import ipc
from pagedd.client.errors import PageddError
from pagedd.client.protocol import (
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    Accepted,
    Cancel,
    Chat,
    ChatMessage,
    ClientMessage,
    Delta,
    Done,
    Failed,
    Generate,
    Ok,
    Ping,
    Pong,
    Sampling,
    SetPriority,
    encode,
)
from pagedd.client.questions import BlockDetail, Evicted, EvictPrefix, GetBlock, GetPrefixes, GetStats, GetText, Stats
from pagedd.client.stats_frame import decode_stats
from pagedd.daemon import zmq_server
from pagedd.daemon.caller import Caller
from pagedd.daemon.engine_state import EngineState
from pagedd.engine.kv.prefix_tree import PrefixRun, PrefixTree
from pagedd.engine.stats import BlockInfo

from .byte_model import EOS
from .scripted_host import ScriptedHost
from .served import Served, ZmqClient, serving
from .waiting import WAIT_S, until

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


def prompt(text: str = "ab", request_id: str = "a", **fields: object) -> Generate:
    return Generate(id=request_id, prompt=text, **fields)  # type: ignore[arg-type]


async def is_alive(served: Served) -> bool:
    async with served.client() as client:
        await client.say(Ping(id="alive?"))
        return isinstance(await client.hear(), Pong)


# Requests


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


async def test_the_caller_is_who_the_kernel_says(served: Served) -> None:
    async with served.client() as client:
        await client.say(prompt())
        await client.hear_end()
    assert served.host.submitted[0].cache_extras == (("caller", f"uid:{os.geteuid()}"),)


# Bad input


@pytest.mark.parametrize(
    ("frames", "code", "message_id"),
    [
        ([pickle.dumps({"a": 1})], "malformed_message", ""),
        ([b""], "malformed_message", ""),
        ([b"", b""], "protocol_version", ""),
        ([b"hello"], "malformed_message", ""),
        ([PROTOCOL_VERSION], "malformed_message", ""),
        ([PROTOCOL_VERSION, b""], "malformed_message", ""),
        ([PROTOCOL_VERSION, pickle.dumps({"a": 1})], "missing_field", ""),
        ([PROTOCOL_VERSION, b"\xc1"], "malformed_message", ""),
        ([PROTOCOL_VERSION, b"\x91" * 100_000], "invalid_type", ""),
        ([PROTOCOL_VERSION, b"\x82\xa4type\xa8generate\xa2id\xa1\xff"], "malformed_message", ""),
        ([PROTOCOL_VERSION, b"x", b"y"], "malformed_message", ""),
        ([b"pagedd0", msgspec.msgpack.encode({"type": "ping", "id": "p"})], "protocol_version", ""),
        ([PROTOCOL_VERSION, msgspec.msgpack.encode({"type": "reboot", "id": "p"})], "invalid_value", "p"),
        ([PROTOCOL_VERSION, msgspec.msgpack.encode({"id": "p"})], "missing_field", "p"),
        ([PROTOCOL_VERSION, msgspec.msgpack.encode({"type": "ping"})], "missing_field", ""),
        ([PROTOCOL_VERSION, msgspec.msgpack.encode({"type": "ping", "id": 5})], "invalid_type", ""),
        ([PROTOCOL_VERSION, msgspec.msgpack.encode({"type": "ping", "id": ""})], "invalid_value", ""),
        ([PROTOCOL_VERSION, msgspec.msgpack.encode({"type": "ping", "id": "p" * 129})], "invalid_value", "p" * 128),
        ([PROTOCOL_VERSION, msgspec.msgpack.encode([1, 2])], "invalid_type", ""),
        ([PROTOCOL_VERSION, encode(SetPriority(id="p", target="a", priority=1))], "forbidden", "p"),
    ],
    ids=lambda value: repr(value)[:60],
)  # fmt: skip
async def test_what_is_no_message_is_answered_with_its_fault(
    served: Served, frames: list[bytes], code: str, message_id: str
) -> None:
    async with served.client() as client:
        await client.socket.send_multipart(frames)
        answer = await client.hear()
        assert isinstance(answer, Failed)
        assert (answer.code, answer.id) == (code, message_id)
        await client.say(Ping(id="still?"))
        assert isinstance(await client.hear(), Pong)


async def test_unknown_fields_are_ignored(served: Served) -> None:
    raw = {"type": "generate", "id": "a", "prompt": "a", "of_a_later_client": [1], "sampling": {"also": {}}}
    async with served.client() as client:
        await client.socket.send_multipart([PROTOCOL_VERSION, msgspec.msgpack.encode(raw)])
        assert isinstance(await client.hear_end(), Done)


async def test_a_frame_of_fifty_megabytes_costs_its_sender_the_connection_and_nobody_else(served: Served) -> None:
    served.host.reply = lambda request: None
    async with served.client() as client, served.client() as other:
        await other.say(prompt())
        assert isinstance(await other.hear(), Accepted)
        await client.socket.send_multipart([PROTOCOL_VERSION, bytes(50_000_000)])
        assert await is_alive(served)
        served.host.produce(served.host.submitted[0].request_id, b"x", finish_reason="length")
        assert isinstance(await other.hear_end(), Done)


async def test_bytes_that_are_not_even_zeromq_harm_nobody(served: Served) -> None:
    for raw in (b"", b"\x00" * 64, b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"\xff" + bytes(8) + b"\x7f\x03"):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(str(served.endpoints.requests))
            stranger.sendall(raw)
    assert await is_alive(served)


@pytest.mark.parametrize("name", ["requests", "admin", "stats"])
@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_connections_beyond_the_bound_are_closed_and_those_within_it_go_on(
    socket_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    run: Callable[[Coroutine[Any, Any, None]], None],
) -> None:
    monkeypatch.setattr(zmq_server, "max_zmq_connections", lambda: 2)

    async def meet_the_bound() -> None:
        async with serving(socket_folder) as served:
            path = str(getattr(served.endpoints, name))
            opened = [await asyncio.open_unix_connection(path) for _ in range(5)]
            greetings = [await asyncio.wait_for(reader.read(10), WAIT_S) for reader, _ in opened[:2]]
            assert all(greeting.startswith(b"\xff") for greeting in greetings)
            for reader, _ in opened[2:]:
                await asyncio.wait_for(reader.read(), WAIT_S)  # to its end
            for _, writer in opened:
                writer.close()
            await asyncio.sleep(0.05)
            assert await is_alive(served)

    run(meet_the_bound())
    assert "limit 2" in caplog.text


async def test_the_largest_message_that_is_allowed_is_read(served: Served) -> None:
    async with served.client() as client:
        await client.say(prompt("a" * (MAX_MESSAGE_BYTES - 1000)))
        end = await client.hear_end()
    assert isinstance(end, Failed)
    assert end.code == "prompt_too_long"


# Clients that leave


async def test_a_client_that_leaves_stops_its_requests_in_whatever_state(served: Served) -> None:
    served.host.reply = lambda request: None
    async with served.client() as stays:
        await stays.say(prompt("stays"))
        await stays.hear()
        async with served.client() as leaves:
            for number in range(3):
                await leaves.say(prompt("leaves", str(number)))
            for _ in range(3):
                await leaves.hear()
            served.host.produce(served.host.submitted[1].request_id, b"x")
        await until(lambda: len(served.host.aborted) == 3)
        assert list(served.host.live) == [served.host.submitted[0].request_id]
        served.host.produce(served.host.submitted[0].request_id, b"y", finish_reason="length")
        assert isinstance(await stays.hear(), Delta)


async def test_two_hundred_clients_that_leave_after_five_tokens_leave_nothing_behind(served: Served) -> None:
    served.host.reply = lambda request: [97] * 2000
    for number in range(200):
        async with served.client() as client:
            await client.say(prompt(sampling=Sampling(max_tokens=2000)))
            for _ in range(6):
                await client.hear()
        async with served.client() as client:
            await client.say(prompt("b", str(number), sampling=Sampling(max_tokens=2), stream=False))
            assert isinstance(await client.hear_end(), Done)
    await until(lambda: not served.host.live)
    assert (await served.service.stats_frame(blocks=False)).requests == []


async def test_a_client_that_takes_the_identity_of_one_that_left_does_not_hear_its_tokens(served: Served) -> None:
    served.host.reply = lambda request: None

    async def client_called(name: bytes) -> ZmqClient:
        dealer = served.context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.IDENTITY, name)
        dealer.connect(ipc(served.endpoints.requests))
        return ZmqClient(dealer)

    first = await client_called(b"same")
    await first.say(prompt())
    await first.hear()
    first.socket.close(linger=0)
    await until(lambda: len(served.host.aborted) == 1)
    second = await client_called(b"same")
    await second.say(Cancel(id="c", target="a"))
    answer = await second.hear()
    second.socket.close(linger=0)
    assert isinstance(answer, Failed)
    assert answer.code == "request_not_found"


# Clients that do not read


async def test_a_client_that_does_not_read_loses_its_requests_and_delays_nobody(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_server, "MAX_BACKLOG_BYTES", 100_000)
    served.host.reply = lambda request: None
    slow = served.context.socket(zmq.DEALER)
    slow.setsockopt(zmq.RCVHWM, 1)
    slow.connect(ipc(served.endpoints.requests))
    await ZmqClient(slow).say(prompt(sampling=Sampling(max_tokens=2000)))
    await until(lambda: bool(served.host.submitted))
    request_id = served.host.submitted[0].request_id
    for _ in range(5000):
        if request_id not in served.host.live:
            break
        served.host.produce(request_id, b"x" * 1000)
        await asyncio.sleep(0)
    assert served.host.aborted == [(request_id, None)]
    assert await is_alive(served)
    # When it reads at last, it hears what was kept and how it ended.
    end = await ZmqClient(slow).hear_end()
    slow.close(linger=0)
    assert isinstance(end, Failed)
    assert end.code == "client_too_slow"


async def test_clients_that_never_read_do_not_hold_up_the_end(socket_folder: Path) -> None:
    async with serving(socket_folder, ScriptedHost(reply=lambda request: None)) as served:
        sleepers = []
        for _ in range(3):
            sleeper = served.context.socket(zmq.DEALER)
            sleeper.setsockopt(zmq.RCVHWM, 1)
            sleeper.connect(ipc(served.endpoints.requests))
            await ZmqClient(sleeper).say(prompt(sampling=Sampling(max_tokens=2000)))
            sleepers.append(sleeper)
        await until(lambda: len(served.host.submitted) == 3)
        for _ in range(2000):
            for request in served.host.submitted:
                served.host.produce(request.request_id, b"x" * 100)
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
    # Generous: it lingers for one second.
    assert loop.time() - begun_s < WAIT_S


# The admin socket


async def test_the_owner_cancels_and_moves_any_request(served: Served) -> None:
    served.host.reply = lambda request: None
    async with served.client() as client, served.client(served.endpoints.admin) as admin:
        await client.say(prompt())
        accepted = await client.hear()
        assert isinstance(accepted, Accepted)
        await admin.say(SetPriority(id="1", target=accepted.request_id, priority=9))
        assert await admin.hear() == Ok(id="1")
        assert served.host.priorities == [(accepted.request_id, 9)]
        await admin.say(SetPriority(id="2", target=accepted.request_id, priority=900))
        refused = await admin.hear()
        assert isinstance(refused, Failed)
        assert (refused.code, refused.field) == ("invalid_value", "priority")
        await admin.say(Cancel(id="3", target=accepted.request_id))
        assert await admin.hear() == Ok(id="3")
        assert isinstance(await client.hear_end(), Done)
        await admin.say(Cancel(id="4", target=accepted.request_id))
        gone = await admin.hear()
        assert isinstance(gone, Failed)
        assert gone.code == "request_not_found"
        await admin.say(prompt())
        refused = await admin.hear()
        assert isinstance(refused, Failed)
        assert refused.code == "forbidden"


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


async def test_the_owner_evicts_a_prefix_through_the_admin_socket_alone(served: Served) -> None:
    run = PrefixRun(
        digest=b"d" * 16,
        parent=None,
        depth=0,
        num_blocks=3,
        num_hits=0,
        last_use_s=0.0,
        state="cached",
        extras=(),
        token_ids=(97,),
    )
    served.host.tree = PrefixTree(runs=[run], num_blocks=3, is_cut=False)
    async with served.client() as client, served.client(served.endpoints.admin) as admin:
        await client.say(EvictPrefix(id="1", digest=run.digest.hex()))
        refused = await client.hear()
        assert isinstance(refused, Failed)
        assert refused.code == "forbidden"
        assert served.host.evicted == []
        await admin.say(EvictPrefix(id="2", digest=run.digest.hex()))
        assert await admin.hear() == Evicted(id="2", num_blocks=3)
        await admin.say(EvictPrefix(id="3", digest="00"))
        refused = await admin.hear()
        assert isinstance(refused, Failed)
        assert (refused.id, refused.code) == ("3", "prefix_not_found")


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


async def test_a_stranger_on_the_admin_socket_is_refused_whatever_the_files_mode(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_server, "caller_of_socket", lambda connection: Caller(uid=os.geteuid() + 1))
    async with served.client(served.endpoints.admin) as admin:
        await admin.say(Cancel(id="1", target="any"))
        refused = await admin.hear()
    assert isinstance(refused, Failed)
    assert refused.code == "forbidden"


# The stats socket


async def test_pictures_are_made_only_while_somebody_looks(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    num_made = 0
    stats_frame = served.service.stats_frame

    async def counted(blocks: bool, viewer: Caller | None = None) -> object:
        nonlocal num_made
        num_made += 1
        return await stats_frame(blocks, viewer)

    monkeypatch.setattr(served.service, "stats_frame", counted)
    await asyncio.sleep(0.4)
    assert num_made == 0
    subscriber = served.context.socket(zmq.SUB)
    subscriber.setsockopt(zmq.CONFLATE, 1)
    subscriber.subscribe(b"")
    subscriber.connect(ipc(served.endpoints.stats))
    frame = decode_stats(await asyncio.wait_for(subscriber.recv(), WAIT_S))
    assert frame.blocks is not None
    assert frame.model == "bytes"
    assert decode_stats(await asyncio.wait_for(subscriber.recv(), WAIT_S)).time_s > frame.time_s
    subscriber.close(linger=0)
    # That it has gone is heard after some time; a feed that goes on for nobody never stops.
    num_before = 0
    async with asyncio.timeout(WAIT_S):
        while num_before != num_made:
            num_before = num_made
            await asyncio.sleep(0.6)


async def test_a_picture_that_cannot_be_made_is_logged_and_the_next_one_comes(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stats_frame = served.service.stats_frame
    faults = [RuntimeError("once")]

    async def fails_once(blocks: bool, viewer: Caller | None = None) -> object:
        if faults:
            raise faults.pop()
        return await stats_frame(blocks, viewer)

    monkeypatch.setattr(served.service, "stats_frame", fails_once)
    subscriber = served.context.socket(zmq.SUB)
    subscriber.subscribe(b"")
    subscriber.connect(ipc(served.endpoints.stats))
    with caplog.at_level(logging.ERROR):
        decode_stats(await asyncio.wait_for(subscriber.recv(), WAIT_S))
    subscriber.close(linger=0)
    assert "a stats frame could not be made" in caplog.text
