"""The daemon's end of ZeroMQ, with real sockets: libzmq's are served, and whoever does harm does it to themselves."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvloop
import zmq
import zmq.asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagedd.client.endpoints import ipc
from pagedd.client.protocol import (
    PROTOCOL_VERSION,
    Accepted,
    Failed,
    GetStats,
    Ping,
    Pong,
    Stats,
    decode_daemon,
    encode,
)
from pagedd.client.stats_frame import decode_stats
from pagedd.daemon import stats_feed, zmq_server, zmtp
from pagedd.daemon.caller import Caller
from pagedd.daemon.zmq_server import Handler, HeldBytes, Peer, Server
from pagedd.daemon.zmtp import SocketKind

from .scripted import WAIT_S, Served, ZmqClient, serving, until
from .test_zmq_api import prompt
from .test_zmtp import GREETING, ready_as

KIND = SocketKind(b"ROUTER", frozenset({b"DEALER", b"REQ", b"ROUTER"}), max_message_bytes=1 << 20, max_frames=8)
HANDSHAKE = GREETING + ready_as(b"DEALER")
run_on_both_loops = pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
Run = Callable[[Coroutine[Any, Any, None]], None]


@dataclass
class Echo(Handler):
    """Says everything again, and keeps who said what."""

    heard: list[tuple[Peer, list[bytes]]] = field(default_factory=list)
    slow: list[Peer] = field(default_factory=list)
    num_gone: int = 0

    def on_message(self, peer: Peer, frames: list[bytes]) -> None:
        self.heard.append((peer, frames))
        peer.send(frames)

    def on_too_slow(self, peer: Peer) -> None:
        self.slow.append(peer)

    def on_gone(self, peer: Peer) -> None:
        self.num_gone += 1


@dataclass
class Running:
    server: Server
    echo: Echo
    path: Path

    async def join(self, handshake: bytes = HANDSHAKE) -> "Raw":
        """A peer that says what it is told to."""
        reader, writer = await asyncio.open_unix_connection(str(self.path))
        writer.write(handshake)
        return Raw(reader, writer)


@dataclass
class Raw:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def hear(self, expected: bytes) -> None:
        got = await asyncio.wait_for(self.reader.readexactly(len(expected)), WAIT_S)
        assert got == expected

    async def until_closed(self) -> bytes:
        """What it still heard."""
        chunks = []
        try:
            while chunk := await asyncio.wait_for(self.reader.read(1 << 16), WAIT_S):
                chunks.append(chunk)
        except ConnectionError:  # it had not read all that was said
            pass
        self.writer.close()
        return b"".join(chunks)


@asynccontextmanager
async def running(folder: Path, held: HeldBytes | None = None, linger_s: float = 0.0) -> AsyncIterator[Running]:
    echo, path = Echo(), folder / "echo.sock"
    server = Server(KIND, path, echo, held or HeldBytes(64 << 20))
    await server.start(0o600, {})
    try:
        yield Running(server, echo, path)
    finally:
        await server.close(linger_s)


@contextmanager
def libzmq(kind: int, path: Path, **options: int | bytes) -> Iterator[zmq.asyncio.Socket]:
    with zmq.asyncio.Context() as context, context.socket(kind) as peer:
        peer.setsockopt(zmq.LINGER, 0)
        for name, value in options.items():
            peer.setsockopt(getattr(zmq, name), value)
        peer.connect(ipc(path))
        yield peer


async def hear(peer: zmq.asyncio.Socket) -> list[bytes]:
    return await asyncio.wait_for(peer.recv_multipart(), WAIT_S)


@pytest.fixture
async def served(socket_folder: Path) -> AsyncIterator[Served]:
    async with serving(socket_folder) as running:
        yield running


# libzmq's sockets


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
            assert [choice.text for choice in end.choices] == [str(number)]  # type: ignore[union-attr]


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


# Whoever means harm


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.sampled_from([b"", GREETING[:11], GREETING, HANDSHAKE]),
    st.lists(
        st.one_of(st.binary(max_size=100), st.just(HANDSHAKE), st.builds(zmtp.command, st.binary(), st.binary())),
        max_size=4,
    ),
)
def test_whatever_bytes_come_the_others_are_served(
    tmp_path_factory: pytest.TempPathFactory, begin: bytes, rest: list[bytes]
) -> None:
    async def talk() -> None:
        async with running(tmp_path_factory.mktemp("s")) as here:
            harmful = await here.join(begin)
            for part in rest:
                harmful.writer.write(part)
                await asyncio.sleep(0)
            other = await here.join()
            other.writer.write(zmtp.message([b"alive?"]))
            await other.hear(GREETING + zmtp.ready(KIND) + zmtp.message([b"alive?"]))
            for peer in (harmful, other):
                peer.writer.close()

    asyncio.run(talk())


async def test_a_handshake_that_does_not_end_ends_its_connection_and_no_other(
    socket_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_server, "HANDSHAKE_S", 0.2)
    async with running(socket_folder) as here:
        ready = await here.join()
        ready.writer.write(zmtp.message([b"early"]))
        await ready.hear(GREETING + zmtp.ready(KIND) + zmtp.message([b"early"]))
        for begin in (b"", GREETING[:5], GREETING, HANDSHAKE[:-1]):
            slow = await here.join(begin)
            assert await slow.until_closed() == GREETING
        ready.writer.write(zmtp.message([b"late"]))
        await ready.hear(zmtp.message([b"late"]))
        ready.writer.close()


@run_on_both_loops
def test_a_thousand_connections_are_served_and_forgotten(socket_folder: Path, run: Run) -> None:
    async def talk() -> None:
        async with running(socket_folder) as here:
            peers = [await here.join() for _ in range(1000)]
            for number, peer in enumerate(peers):
                peer.writer.write(zmtp.message([b"%d" % number]))
            for number, peer in enumerate(peers):
                await peer.hear(GREETING + zmtp.ready(KIND) + zmtp.message([b"%d" % number]))
                peer.writer.close()
            await until(lambda: here.echo.num_gone == 1000)
            assert (here.server._peers, here.server._num_peers) == ({}, 0)

    run(talk())


@pytest.mark.parametrize(
    "part", [b"\x01\x00", b"\x03" + (1 << 18).to_bytes(8) + bytes(1 << 18)], ids=["empty", "large"]
)
async def test_a_message_that_does_not_end_costs_its_sender_the_connection_and_nobody_else(
    socket_folder: Path, part: bytes
) -> None:
    held = HeldBytes(64 << 20)
    async with running(socket_folder, held) as here:
        endless, other = await here.join(), await here.join()
        for _ in range(9):
            endless.writer.write(part)
        await endless.until_closed()
        other.writer.write(zmtp.message([b"alive?"]))
        await other.hear(GREETING + zmtp.ready(KIND) + zmtp.message([b"alive?"]))
        assert held._total == 0
        other.writer.close()


def users(monkeypatch: pytest.MonkeyPatch, *uids: int) -> None:
    """The users of the next connections, in order; then the first again."""
    coming = iter(uids)
    monkeypatch.setattr(zmq_server, "caller_of_socket", lambda connection: Caller(uid=next(coming, uids[0])))


async def test_of_all_that_is_kept_the_user_who_has_most_of_it_loses_most(
    socket_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    users(monkeypatch, 100_001, 100_001, 100_002)
    part = b"\x03" + (200_000).to_bytes(8) + bytes(200_000)
    async with running(socket_folder, HeldBytes(500_000)) as here:
        small, large, other = [await here.join() for _ in range(3)]
        other.writer.write(part)
        small.writer.write(part[:50_000])
        await until(lambda: here.server.held._total >= 250_000)
        large.writer.write(part + part[:100_000])
        await large.until_closed()
        await until(lambda: here.server.held._total == 250_000)
        for peer, end in ((small, part[50_000:] + b"\x00\x00"), (other, b"\x00\x00")):
            peer.writer.write(end)
            await peer.hear(GREETING + zmtp.ready(KIND) + zmtp.message([bytes(200_000), b""]))
            peer.writer.close()
    assert "one of 100001 is closed" in caplog.text


async def test_beyond_the_bound_the_user_with_most_connections_loses_one(
    socket_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_server, "max_zmq_connections", lambda: 3)
    users(monkeypatch, 100_001, 100_001, 100_001, 100_002, 100_001)
    async with running(socket_folder) as here:
        first, second, newest, other, beyond = [await here.join() for _ in range(5)]
        for closed in (newest, beyond):
            await closed.until_closed()
        for peer in (first, second, other):
            peer.writer.write(zmtp.message([b"alive?"]))
            await peer.hear(GREETING + zmtp.ready(KIND) + zmtp.message([b"alive?"]))
            peer.writer.close()


@pytest.mark.parametrize(
    "flood",
    [
        [zmtp.command(b"SUBSCRIBE", b"%d" % number) for number in range(5)],
        [zmtp.message([b"\x01%d" % number]) for number in range(5)],
        [zmtp.command(b"SUBSCRIBE", bytes(65))],
        [zmtp.message([b"\x01" + bytes(65)])],
        [zmtp.message([b"\x01" + bytes(720)])],
    ],
    ids=["many", "many of 3.0", "long", "long of 3.0", "very long"],
)
async def test_a_flood_of_subscriptions_costs_its_sender_the_connection_and_nobody_else(
    served: Served, flood: list[bytes]
) -> None:
    with libzmq(zmq.SUB, served.endpoints.stats, SUBSCRIBE=b"", CONFLATE=1) as other:
        decode_stats(await asyncio.wait_for(other.recv(), WAIT_S))
        reader, writer = await asyncio.open_unix_connection(str(served.endpoints.stats))
        writer.write(GREETING + ready_as(b"XSUB"))
        await reader.readuntil(b"PUB")
        writer.write(b"".join(flood))
        await Raw(reader, writer).until_closed()
        feed = served.zmq_api._feed
        assert feed is not None
        await until(lambda: list(feed._topics.values()) == [{b""}])
        decode_stats(await asyncio.wait_for(other.recv(), WAIT_S))


async def test_whoever_sends_much_at_once_lets_the_others_have_their_turn(socket_folder: Path) -> None:
    async with running(socket_folder) as here:
        flood, other = await here.join(), await here.join()
        for peer in (flood, other):
            await peer.hear(GREETING + zmtp.ready(KIND))
        flood.writer.write(zmtp.message([b"flood"]) * 20_000)
        other.writer.write(zmtp.message([b"other"]))
        await other.hear(zmtp.message([b"other"]))
        said = [frames for _, frames in here.echo.heard]
        assert said.count([b"flood"]) < 20_000
        await flood.hear(zmtp.message([b"flood"]) * 20_000)
        for peer in (flood, other):
            peer.writer.close()


# Whoever does not read


@run_on_both_loops
def test_one_that_does_not_read_is_too_slow_once_and_hears_what_is_urgent(
    socket_folder: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.setattr(zmq_server, "MAX_BACKLOG_BYTES", 100_000)

    async def talk() -> None:
        held = HeldBytes(64 << 20)
        async with running(socket_folder, held) as here:
            slow = await here.join(HANDSHAKE + zmtp.message([b"hello"]))
            await until(lambda: len(here.echo.heard) == 1)
            [(peer, _)] = here.echo.heard
            # One answer may be larger than the whole backlog: it is under way, and nothing waits behind it.
            peer.send([bytes(1_000_000)])
            peer.send([b"small"])
            await asyncio.sleep(0)
            assert here.echo.slow == []
            for _ in range(100):
                peer.send([bytes(10_000)])
            peer.send([b"the end"], is_urgent=True)
            await until(lambda: here.echo.slow == [peer])
            assert held._total < 1_000_000 + 100_000 + 2 * 10_100
            kept = [b"hello", bytes(1_000_000), b"small", *[bytes(10_000)] * 10, b"the end"]
            await slow.hear(GREETING + zmtp.ready(KIND) + b"".join(zmtp.message([frame]) for frame in kept))
            assert here.echo.slow == [peer]
            assert held._total == 0
            slow.writer.close()

    run(talk())


@run_on_both_loops
def test_a_picture_that_waits_gives_way_to_a_newer_one(socket_folder: Path, run: Run) -> None:
    async def talk() -> None:
        async with running(socket_folder) as here:
            slow = await here.join(HANDSHAKE + zmtp.message([b"hello"]))
            await until(lambda: len(here.echo.heard) == 1)
            [(peer, _)] = here.echo.heard
            pictures = [zmtp.message([bytes([number]) * 1_000_000]) for number in range(10)]
            for picture in pictures:
                peer.send_newest(picture)
                await asyncio.sleep(0)
            await slow.hear(GREETING + zmtp.ready(KIND) + zmtp.message([b"hello"]) + pictures[0] + pictures[9])
            slow.writer.close()

    run(talk())


@run_on_both_loops
def test_what_was_said_last_arrives_though_the_server_closes(socket_folder: Path, run: Run) -> None:
    async def talk() -> None:
        async with running(socket_folder, linger_s=WAIT_S) as here:
            slow = await here.join(HANDSHAKE + zmtp.message([b"hello"]))
            await until(lambda: len(here.echo.heard) == 1)
            for _ in range(3):
                here.echo.heard[0][0].send([bytes(1_000_000)])
            reading = asyncio.create_task(slow.until_closed())
        said = [b"hello", *[bytes(1_000_000)] * 3]
        expected = GREETING + zmtp.ready(KIND) + b"".join(zmtp.message([frame]) for frame in said)
        assert await reading == expected
        assert not here.path.exists()

    run(talk())
