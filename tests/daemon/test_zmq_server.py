"""Whoever does harm over ZeroMQ, or does not read, does it to themselves."""

import asyncio
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagedd.client.stats_frame import decode_stats
from pagedd.daemon import zmq_server, zmtp
from pagedd.daemon.caller import Caller
from pagedd.daemon.zmq_server import HeldBytes

from .served import Served
from .test_zmtp import GREETING, ready_as
from .waiting import WAIT_S, until
from .zmq_peers import HANDSHAKE, KIND, Raw, Run, libzmq, run_on_both_loops, running

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
