"""The blocking client: the same, from any thread."""

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pagedd.client import Client, PageddError
from pagedd.client.protocol import Cancel, Chat, Delta, Generate
from pagedd.client.stats_frame import StatsFrame

from .fake_daemon import FakeDaemon


def test_iterating_gives_the_deltas_and_result_the_whole_answer(daemon: FakeDaemon, directory: Path) -> None:
    with Client(directory) as client:
        generation = client.generate("count", max_tokens=3)
        assert [delta.text for delta in generation] == ["one", " two", " three"]
        assert generation.result().choices[0].text == "one two three"
        assert generation.request_id == "r1"
        assert client.chat([{"role": "user", "content": "hi"}]).result().usage.prompt_tokens == 5
    assert daemon.hear(Generate).stream is True
    assert daemon.hear(Chat).stream is False


def test_several_threads_share_one_client(daemon: FakeDaemon, directory: Path) -> None:
    with Client(directory) as client, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: client.generate("x").result().choices[0].text, range(40)))
    assert answers == ["one two three"] * 40


def test_leaving_the_loop_early_cancels_the_request(daemon: FakeDaemon, directory: Path) -> None:
    daemon.answer = lambda message: [Delta(id=message.id, text="a")] if isinstance(message, Generate) else []
    with Client(directory) as client:
        for _ in client.generate("x"):
            break
        asked = daemon.hear(Generate)
        assert daemon.hear(Cancel).target == asked.id


def test_a_refusal_reaches_the_caller(daemon: FakeDaemon, directory: Path) -> None:
    daemon.stop()
    client = Client(directory)
    with pytest.raises(PageddError, match="daemon_unreachable"):
        client.generate("x").result()
    with pytest.raises(PageddError, match="daemon_unreachable"):
        list(client.generate("x"))
    with pytest.raises(PageddError, match="daemon_unreachable"):
        next(client.watch_stats())
    client.close()


def test_entering_without_a_daemon_fails_and_leaves_no_thread(directory: Path) -> None:
    before = threading.active_count()
    with pytest.raises(PageddError, match="daemon_unreachable"), Client(directory):
        pass
    assert threading.active_count() == before


def test_stats_can_be_watched_and_left(daemon: FakeDaemon, directory: Path) -> None:
    stop = threading.Event()

    def publish() -> None:
        while not stop.wait(0.01):
            daemon.publish(daemon.frame)

    threading.Thread(target=publish, daemon=True).start()
    with Client(directory) as client:
        for frame in client.watch_stats():
            assert frame.model == "tiny"
            break
        assert client.stats().uptime_s == 61.0
        assert client.ping().state == "ready"
        client.cancel("r1")
        client.set_priority("r1", 3)
        assert client.block(1).index == 1
        assert client.prefixes().num_blocks == 2
        assert client.text("r1").prompt == "once"
        assert client.previews() == {"r1": "once"}
        assert client.evict_prefix("d1").num_blocks == 2
    stop.set()


@pytest.mark.parametrize("waits", [True, False], ids=["while it is waited for", "before it is waited for"])
def test_ctrl_c_for_a_picture_that_does_not_come_ends_the_watching_cleanly(
    daemon: FakeDaemon, directory: Path, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    has_begun = threading.Event()
    has_left = threading.Event()

    async def silent() -> AsyncIterator[StatsFrame]:
        try:
            has_begun.set()
            await asyncio.sleep(3600)
            yield daemon.frame
        finally:
            await asyncio.sleep(0.1)  # closing takes its time
            has_left.set()

    def interrupt() -> None:
        has_begun.wait()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    with Client(directory) as client:
        start = client._start

        def start_and_interrupt(work: Coroutine[Any, Any, Any]) -> None:
            monkeypatch.setattr(client, "_start", start)
            start(work)
            has_begun.wait()
            raise KeyboardInterrupt

        monkeypatch.setattr(client._client, "watch_stats", silent)
        if waits:
            threading.Thread(target=interrupt).start()
        else:
            monkeypatch.setattr(client, "_start", start_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(client.watch_stats())
        assert has_left.is_set()


def test_a_closed_client_says_so(daemon: FakeDaemon, directory: Path) -> None:
    client = Client(directory)
    client.close()
    client.close()
    with pytest.raises(RuntimeError, match="closed"):
        client.ping()
