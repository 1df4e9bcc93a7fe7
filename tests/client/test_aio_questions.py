"""What the asyncio client asks a daemon, watches of it and does to the requests of others."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from pagedd.client import AsyncClient, protocol
from pagedd.client.protocol import Cancel, Pong, SetPriority
from pagedd.client.questions import EvictPrefix, GetBlock, GetPrefixes, GetStats, GetText

from .fake_daemon import FakeDaemon


async def test_cancel_ends_anothers_request_over_the_admin_socket(daemon: FakeDaemon, directory: Path) -> None:
    async with AsyncClient(directory) as client:
        await client.cancel("r42")
        await client.set_priority("r42", 7)
    assert daemon.hear(Cancel, "admin").target == "r42"
    message = daemon.hear(SetPriority, "admin")
    assert (message.target, message.priority) == ("r42", 7)


async def test_stats_and_ping_answer(daemon: FakeDaemon, directory: Path) -> None:
    async with AsyncClient(directory) as client:
        assert (await client.stats(blocks=True)).requests[1].block_table == [1, 4]
        assert daemon.hear(GetStats).blocks is True
        assert (await client.ping()).state == "ready"


async def test_a_block_the_prefixes_and_a_text_are_asked_for_over_the_request_socket(
    daemon: FakeDaemon, directory: Path
) -> None:
    async with AsyncClient(directory) as client:
        assert (await client.block(3)).text == "once"
        assert [node.digest for node in (await client.prefixes(limit=5)).nodes] == ["d1"]
        assert (await client.text("r1")).outputs == ["one two three"]
        assert await client.previews() == {"r1": "once"}
    assert daemon.hear(GetBlock).index == 3
    assert daemon.hear(GetPrefixes).limit == 5
    assert daemon.hear(GetText).target == "r1"


async def test_a_prefix_is_evicted_over_the_admin_socket(daemon: FakeDaemon, directory: Path) -> None:
    async with AsyncClient(directory) as client:
        assert (await client.evict_prefix("d1")).num_blocks == 2
    assert daemon.hear(EvictPrefix, "admin").digest == "d1"


async def test_what_comes_without_an_id_is_no_ones_answer(daemon: FakeDaemon, directory: Path) -> None:
    daemon.answer = lambda message: [Pong(id=""), *daemon.default_answer(message)]
    async with AsyncClient(directory) as client:
        assert (await client.ping()).version == "0.1.0"


async def test_watching_gives_the_newest_frame_to_a_slow_reader(
    daemon: FakeDaemon, directory: Path, eventually: Callable[[Callable[[], bool]], None]
) -> None:
    client = AsyncClient(directory)
    watching = client.watch_stats()
    first = asyncio.ensure_future(anext(watching))
    while not first.done():  # a PUB drops what it says before a subscriber has joined
        daemon.publish(daemon.frame)
        await asyncio.sleep(0.01)
    for uptime_s in range(100, 200):
        daemon.frame.uptime_s = float(uptime_s)
        daemon.publish(protocol.encode(daemon.frame))
    await asyncio.to_thread(eventually, daemon.has_published)
    num_read = 1
    while (await anext(watching)).uptime_s != 199.0:
        num_read += 1
    assert num_read < 20
    await watching.aclose()
    await client.close()
