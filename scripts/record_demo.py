"""Records the session that `pagetop --demo` shows: a real daemon on a small pool, with more to do than it has room for.

    python -P scripts/record_demo.py [--seconds 40] [--model NAME] [FILE]

What people ask is made up, the answers are the model's. The pool is small so that blocks are shared, evicted and taken
away within a minute; long prompts of low priority are computed in chunks beside chats that share a beginning. Now and
then an administrator cancels a request or changes a priority, and somebody asks for what cannot be.
"""

import argparse
import asyncio
import contextlib
import itertools
import random
from pathlib import Path

from pagedd.bench.daemon_process import running_daemon
from pagedd.client.aio import AsyncClient
from pagedd.client.errors import PageddError
from pagedd.client.stats_frame import StatsFrame
from pagedd.tui.feed import LiveFeed
from pagedd.tui.recording import DEMO
from pagedd.tui.session import Session

FLAGS = ("--num-blocks", "320", "--max-num-seqs", "10", "--max-num-batched-tokens", "256", "--max-model-len", "4096")
SYSTEMS = (
    "You are the assistant of a small bookshop by the sea. Answer in a few friendly sentences, name prices in crowns, "
    "never promise a book that is not on the shelf. The shop opens at nine, closes at six, and rests on Sundays.",
    "You explain computers to people who are curious and not experts. Use one example from a kitchen in every answer, "
    "say what a thing is for before you say how it works, and stop before it becomes a lecture.",
)
QUESTIONS = (
    "Do you have something for a ten-year-old who loves whales?",
    "Why does my laptop forget what I was doing when it is switched off?",
    "Which book would you take to a lighthouse for a winter?",
    "What is a cache, and why would one want to throw things out of it?",
    "Can I order a map of the islands?",
    "What does a scheduler do all day?",
    "Is the shop open on Sunday?",
    "How can a program remember a long text?",
)
_TOPICS = ("the harbour", "the ferry", "the school", "the lighthouse", "the library", "the market")
_PREFIX_INTERVAL_S = 2.0
_TEXT_INTERVAL_S = 1.0


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=DEMO)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    arguments = parser.parse_args()
    arguments.file.unlink(missing_ok=True)
    async with running_daemon(["--model", arguments.model, *FLAGS]) as daemon:
        directory = daemon.http_socket.parent
        load = asyncio.create_task(_load(directory))
        # What a visitor sees first is a daemon in the middle of its day.
        await asyncio.sleep(6)
        await _record(directory, arguments.file, arguments.seconds)
        load.cancel()
        with contextlib.suppress(asyncio.CancelledError, PageddError):
            await load
    print(f"{arguments.file}: {arguments.file.stat().st_size} bytes")


async def _record(directory: Path, file: Path, seconds: float) -> None:
    session = Session(LiveFeed(str(directory)))
    session.start_recording(file)
    asking = asyncio.create_task(_ask(session))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await session.watch(lambda: None)
    asking.cancel()
    await session.close()


async def _ask(session: Session) -> None:
    """Asks what a person would look at, so that a replay has it too."""
    for turn in itertools.count():
        if turn % (_PREFIX_INTERVAL_S / _TEXT_INTERVAL_S) == 0:
            with contextlib.suppress(PageddError):
                await session.prefixes()
        frame: StatsFrame | None = session.state.frame
        for request_id in {row.request_id for row in frame.requests} if frame is not None else ():
            with contextlib.suppress(PageddError):
                await session.text(request_id)
        await asyncio.sleep(_TEXT_INTERVAL_S)


async def _load(directory: Path) -> None:
    """Chats all the time, and now and then a long text of low priority or an urgent question."""
    draw = random.Random(4)
    async with AsyncClient(directory) as client, asyncio.TaskGroup() as group:
        for number in range(12):
            group.create_task(_chat(client, random.Random(number)))
        for _ in range(2):
            group.create_task(_summarise(client, draw))
        group.create_task(_administer(directory, draw))
        group.create_task(_ask_too_much(client, draw))


async def _chat(client: AsyncClient, draw: random.Random) -> None:
    while True:
        await asyncio.sleep(draw.uniform(0.0, 1.2))
        messages = [
            {"role": "system", "content": draw.choice(SYSTEMS)},
            {"role": "user", "content": draw.choice(QUESTIONS)},
        ]
        priority = draw.choice((0, 0, 0, 20))
        with contextlib.suppress(PageddError):
            await client.chat(messages, priority=priority, max_tokens=draw.randint(100, 300), temperature=0.8)


async def _summarise(client: AsyncClient, draw: random.Random) -> None:
    while True:
        minutes = " ".join(
            f"Item {item}: the council spoke about {draw.choice(_TOPICS)} for {draw.randint(2, 50)} minutes, undecided."
            for item in range(draw.randint(25, 70))
        )
        with contextlib.suppress(PageddError):
            await client.generate(
                f"Minutes of the meeting. {minutes}\nIn short:", priority=-10, max_tokens=120, temperature=0.5
            )
        await asyncio.sleep(draw.uniform(0.5, 3.0))


async def _administer(directory: Path, draw: random.Random) -> None:
    async with AsyncClient(directory) as admin:
        for turn in itertools.count():
            await asyncio.sleep(draw.uniform(1.5, 3.0))
            rows = (await admin.stats()).requests
            # A request may have ended since.
            with contextlib.suppress(PageddError, IndexError):
                if turn % 3 == 2:
                    await admin.cancel(draw.choice([row for row in rows if row.state == "decode"]).request_id)
                else:
                    row = draw.choice([row for row in rows if row.priority < 20])
                    await admin.set_priority(row.request_id, row.priority + 10)


async def _ask_too_much(client: AsyncClient, draw: random.Random) -> None:
    while True:
        await asyncio.sleep(draw.uniform(1.0, 4.0))
        with contextlib.suppress(PageddError):
            await client.generate("Once", max_tokens=100_000).result()
        await asyncio.sleep(draw.uniform(1.0, 4.0))
        with contextlib.suppress(PageddError):
            await client.generate("Once", temperature=9.0).result()


if __name__ == "__main__":
    asyncio.run(main())
