"""libzmq's sockets at the daemon's end of ZeroMQ, and what they call themselves."""

import asyncio
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from pagedd.client.endpoints import ipc
from pagedd.client.protocol import PROTOCOL_VERSION, Accepted, Cancel, Done, Failed, Ping, Pong, decode_daemon, encode
from pagedd.client.questions import GetStats, Stats
from pagedd.client.stats_frame import decode_stats
from pagedd.daemon import stats_feed, zmq_server, zmtp

from .served import Served, ZmqClient, prompt, serving
from .test_zmtp import GREETING, ready_as
from .waiting import WAIT_S, until
from .zmq_peers import Raw, Run, hear, libzmq, run_on_both_loops, running


@pytest.mark.parametrize("kind", [zmq.DEALER, zmq.REQ, zmq.ROUTER], ids=["DEALER", "REQ", "ROUTER"])
async def test_every_socket_that_may_ask_is_answered(served: Served, kind: int) -> None:
    options: dict[str, bytes] = {"CONNECT_ROUTING_ID": b"daemon"} if kind == zmq.ROUTER else {}
    address = list(options.values())
    with libzmq(kind, served.endpoints.requests, **options) as peer:
        for question, answer in ((Ping(id="p"), Pong), (GetStats(id="s"), Stats)):
            await peer.send_multipart([*address, PROTOCOL_VERSION, encode(question)])
            *envelope, version, payload = await hear(peer)
            assert (envelope, version) == (address, PROTOCOL_VERSION)
            assert isinstance(decode_daemon(payload), answer)


@pytest.mark.parametrize("kind", [zmq.SUB, zmq.PULL, zmq.PAIR, zmq.REP], ids=["SUB", "PULL", "PAIR", "REP"])
async def test_a_socket_of_another_kind_is_left(served: Served, kind: int) -> None:
    events = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
    with libzmq(kind, served.endpoints.requests, RECONNECT_IVL=-1) as peer, peer.get_monitor_socket(events) as monitor:
        event, _ = await hear(monitor)
        peer.disable_monitor()
    assert int.from_bytes(event[:2], "little") == zmq.EVENT_DISCONNECTED


async def test_a_socket_of_another_kind_hears_why_it_is_left(socket_folder: Path) -> None:
    async with running(socket_folder) as here:
        refused = await here.join(GREETING + ready_as(b"SUB") + zmtp.message([b"early"]))
        why = b"a socket of type b'SUB'; a ROUTER talks to DEALER, REQ, ROUTER"
        assert await refused.until_closed() == GREETING + zmtp.command(b"ERROR", bytes([len(why)]) + why)
        assert here.echo.heard == []


@run_on_both_loops
def test_frames_of_any_size_go_there_and_back(socket_folder: Path, run: Run) -> None:
    async def talk() -> None:
        async with running(socket_folder) as here:
            with libzmq(zmq.DEALER, here.path) as peer:
                for sizes in ([0], [1, 0], [254, 255, 256, 257], [70_000, 3, 900_000]):
                    frames = [bytes([size % 251]) * size for size in sizes]
                    await peer.send_multipart(frames)
                    assert await hear(peer) == frames

    run(talk())


async def test_heartbeats_are_answered(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    contexts: list[bytes] = []

    def pong(context: bytes) -> bytes:
        contexts.append(context)
        return zmtp.command(b"PONG", context)

    monkeypatch.setattr(zmq_server.zmtp, "pong", pong)
    with libzmq(zmq.DEALER, served.endpoints.requests, HEARTBEAT_IVL=10, HEARTBEAT_TIMEOUT=10_000) as peer:
        served.host.reply = lambda request: None
        client = ZmqClient(peer)
        await client.say(prompt())
        assert isinstance(await client.hear(), Accepted)
        await until(lambda: len(contexts) > 5)
        served.host.produce(served.host.submitted[0].request_id, b"x", finish_reason="length")
        await client.hear_end()


async def test_a_router_probe_is_refused_as_the_message_that_it_is_and_the_talk_goes_on(served: Served) -> None:
    with libzmq(zmq.DEALER, served.endpoints.requests, PROBE_ROUTER=1) as peer:
        client = ZmqClient(peer)
        await client.say(Ping(id="p"))
        refused = await client.hear()
        assert isinstance(refused, Failed)
        assert (refused.id, refused.code) == ("", "malformed_message")
        assert isinstance(await client.hear(), Pong)


@run_on_both_loops
def test_sockets_that_stay_find_the_next_server_at_the_same_path(socket_folder: Path, run: Run) -> None:
    async def talk() -> None:
        with libzmq(zmq.DEALER, socket_folder / "echo.sock", RECONNECT_IVL=5, ROUTING_ID=b"me") as peer:
            for number in range(3):
                async with running(socket_folder) as here:
                    await peer.send_multipart([b"%d" % number])
                    assert await hear(peer) == [b"%d" % number]
                    await asyncio.sleep(0)
                assert here.echo.num_gone == 1

    run(talk())


async def test_a_subscriber_that_stays_gets_the_pictures_of_the_next_daemon(socket_folder: Path) -> None:
    with libzmq(zmq.SUB, socket_folder / "run" / "stats.sock", RECONNECT_IVL=5, CONFLATE=1, SUBSCRIBE=b"") as peer:
        for _ in range(2):
            async with serving(socket_folder) as served:
                while (frame := decode_stats(await asyncio.wait_for(peer.recv(), WAIT_S))).uptime_s > 1:
                    pass  # the last one's
                assert frame.model == "bytes"
                await until(lambda: bool(served.zmq_api._feed and served.zmq_api._feed._topics))


@pytest.mark.parametrize(
    ("subscribe", "unsubscribe"),
    [
        (zmtp.message([b"\x01"]), zmtp.message([b"\x00"])),
        (zmtp.command(b"SUBSCRIBE", b""), zmtp.command(b"CANCEL", b"")),
    ],
    ids=["3.0", "3.1"],
)
async def test_a_subscription_holds_until_it_is_taken_back(
    socket_folder: Path, monkeypatch: pytest.MonkeyPatch, subscribe: bytes, unsubscribe: bytes
) -> None:
    monkeypatch.setattr(stats_feed, "INTERVAL_S", 0.005)
    async with serving(socket_folder) as served:
        reader, writer = await asyncio.open_unix_connection(str(served.endpoints.stats))
        writer.write(GREETING + ready_as(b"SUB") + subscribe)
        for _ in range(3):
            await asyncio.wait_for(reader.readuntil(b"interval_s"), WAIT_S)
        writer.write(unsubscribe)
        feed = served.zmq_api._feed
        assert feed is not None
        await until(lambda: not feed._topics)
        assert not feed._has_subscribers.is_set()
        writer.close()


# What a peer calls itself


async def test_peers_with_the_same_identity_are_as_many_peers(served: Served) -> None:
    path = served.endpoints.requests
    served.host.reply = lambda request: None
    with libzmq(zmq.DEALER, path, ROUTING_ID=b"same") as one, libzmq(zmq.DEALER, path, ROUTING_ID=b"same") as other:
        for number, peer in enumerate((one, other)):
            await ZmqClient(peer).say(prompt())
            assert isinstance(await ZmqClient(peer).hear(), Accepted)
            served.host.produce(served.host.submitted[number].request_id, b"%d" % number, finish_reason="length")
        for number, peer in enumerate((one, other)):
            end = await ZmqClient(peer).hear_end()
            assert isinstance(end, Done)
            assert end.choices[0].text == str(number)


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


async def test_whoever_takes_an_identity_the_moment_it_is_free_gets_nothing_that_was_meant_for_it(
    served: Served,
) -> None:
    served.host.reply = lambda request: None
    ready = ready_as(b"DEALER", b"\x00abcd")
    victim, thief = [Raw(*await asyncio.open_unix_connection(str(served.endpoints.requests))) for _ in range(2)]
    thief.writer.write(GREETING)
    victim.writer.write(GREETING + ready)
    await victim.reader.readuntil(b"ROUTER")
    victim.writer.write(zmtp.message([PROTOCOL_VERSION, encode(prompt(stream=False))]))
    await victim.reader.readuntil(b"accepted")
    victim.writer.transport.abort()
    thief.writer.write(ready)
    await until(lambda: len(served.host.aborted) == 1)
    assert served.host.live == {}
    thief.writer.write(zmtp.message([PROTOCOL_VERSION, encode(Ping(id="p"))]))
    heard = await asyncio.wait_for(thief.reader.readuntil(b"pong"), WAIT_S)
    assert b"accepted" not in heard
    assert b"done" not in heard
    thief.writer.close()
