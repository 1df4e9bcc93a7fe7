"""What watching costs: the steps beside those who look, and the making of one picture of a large pool.

    python -P -m pagedd.bench.stats_feed
    python -P -m pagedd.bench.stats_feed --watchers pagetop --rounds 10

Two parts. *Steps*: a daemon decodes `--sequences` answers at a time, and windows without and with `--subscribers`
attached take turns, so that what drifts falls on both. A window with subscribers is held against the mean of its
neighbours without; the table has the median of these differences, and their quartiles.

    wall        wall time of a window over its steps: what users feel, the watchers' share of the processor included
    engine CPU  processor time of the engine process over its steps (/proc/PID/task/*/schedstat): what the daemon itself
                spends, however many others compete. With `--num-threads 1`, where no thread waits for another and spins
    front %     of one core, of the front process, in windows with subscribers less that in those without
    watchers %  of one core, of all watchers together

    sockets     subscribers that receive and drop: the daemon's own cost
    pagetop     real screens, in terminals of 160 × 48, which need the processor themselves

*Pictures*: the engine's bookkeeping with 64 sequences over pools of several sizes, without a model, and the front's
part beside it. Medians, in ms.

    engine ms   copying blocks, ages, fills and block tables, and encoding them: what delays a step
    front ms    decoding, building the frame and encoding it once for all subscribers
    engine %    share of one core at four pictures a second; front % likewise
"""

import argparse
import asyncio
import contextlib
import itertools
import os
import pty
import statistics
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from fcntl import ioctl
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import psutil
import zmq

from pagedd.bench.daemon_process import running_daemon
from pagedd.bench.pagetop import PAINTED
from pagedd.bench.report import Cell, print_report, table
from pagedd.client.aio import AsyncClient
from pagedd.client.endpoints import Endpoints, ipc
from pagedd.client.protocol import encode
from pagedd.daemon import engine_link
from pagedd.daemon.config import DaemonConfig
from pagedd.daemon.engine_host import EngineHost
from pagedd.daemon.engine_state import EngineState
from pagedd.daemon.service import Service
from pagedd.daemon.stats_feed import INTERVAL_S
from pagedd.engine.config import SchedulerConfig
from pagedd.engine.engine import Engine
from pagedd.engine.kv.block_manager import BlockManager
from pagedd.engine.request import Request
from pagedd.engine.sampling_params import SamplingParams
from pagedd.engine.scheduler import Scheduler
from pagedd.engine.stats import EngineSnapshot
from pagedd.engine.step import Runner, Sampled, Step

BLOCK_SIZE = 16
NUM_SEQUENCES = 64
MAX_TOKENS = 600  # of an answer at most: short, so that a step costs about the same in every window
_SETTLE_S = {"sockets": 0.3, "pagetop": 1.0}
_SCREEN = (48, 160)  # rows, columns
_PAINTING_LIMIT_S = 60.0


# --- steps ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Window:
    """Seconds a step, and shares of one core."""

    wall_s: float
    engine_cpu_s: float
    front: float
    watchers: float


class Watch(Protocol):
    """Attaches so many subscribers; gives the ids of their processes, if they have some of their own."""

    def __call__(self, endpoints: Endpoints, count: int) -> contextlib.AbstractAsyncContextManager[list[int]]: ...


async def step_windows(args: argparse.Namespace, watch: Watch) -> tuple[list[Window], list[Window]]:
    """Windows without and with subscribers, in turn; one more without."""
    num_blocks = args.sequences * (MAX_TOKENS // BLOCK_SIZE + 2)
    flags = ["--model", args.model, "--num-blocks", str(num_blocks), "--max-num-seqs", str(args.sequences)]
    # A step is then a token of each, whatever they write.
    flags += ["--num-speculative-tokens", "0"]
    if args.num_threads is not None:
        flags += ["--num-threads", str(args.num_threads)]
    async with running_daemon(flags) as daemon:
        endpoints = Endpoints(daemon.http_socket.parent)
        async with AsyncClient(endpoints.directory, timeout_s=60.0) as client:
            load = [asyncio.ensure_future(_answer(client, number)) for number in range(args.sequences)]
            while (await client.stats()).figures["num_requests_running"] != args.sequences:  # noqa: ASYNC110
                await asyncio.sleep(0.1)  # what is waited for has no event
            await asyncio.sleep(5.0)  # until the answers are of all lengths
            without, watched = [await _window(client, daemon.pid, [], args.window)], []
            for _ in range(args.rounds):
                async with watch(endpoints, args.subscribers) as pids:
                    await asyncio.sleep(_SETTLE_S[args.watchers])
                    watched.append(await _window(client, daemon.pid, pids, args.window))
                await asyncio.sleep(_SETTLE_S["sockets"])
                without.append(await _window(client, daemon.pid, [], args.window))
            for task in load:
                task.cancel()
            await asyncio.gather(*load, return_exceptions=True)
    return without, watched


async def _answer(client: AsyncClient, number: int) -> None:
    """One answer after another."""
    for turn in itertools.count():
        # Of different lengths, so that they do not all begin and end together.
        length = MAX_TOKENS * (4 + number % 5) // 8
        await client.generate(f"Story {number}.{turn}:", max_tokens=length, ignore_eos=True, seed=number).result()


async def _window(client: AsyncClient, front: int, watchers: Sequence[int], seconds: float) -> Window:
    """Each of the two questions costs a picture, in every window alike."""
    children = psutil.Process(front).children()
    (engine,) = (child.pid for child in children if "engine_process" in " ".join(child.cmdline()))

    def spent() -> tuple[float, float, float]:
        return cpu_s(engine), cpu_s(front), sum(map(cpu_s, watchers))

    first, before = await client.stats(), spent()
    await asyncio.sleep(seconds)
    last, after = await client.stats(), spent()
    num_steps = (last.figures["steps_total"] or 0) - (first.figures["steps_total"] or 0)
    wall_s = last.time_s - first.time_s
    engine_s, front_s, watchers_s = (late - early for early, late in zip(before, after, strict=True))
    return Window(wall_s / num_steps, engine_s / num_steps, front_s / wall_s, watchers_s / wall_s)


def cpu_s(pid: int) -> float:
    """Processor seconds that all threads of a process have had, to the nanosecond."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


@contextlib.asynccontextmanager
async def sockets(endpoints: Endpoints, count: int) -> AsyncIterator[list[int]]:
    """Subscribers in a thread of this process that receive what comes and drop it."""
    context = zmq.Context()
    is_over = threading.Event()

    def receive() -> None:
        subscribers = []
        for _ in range(count):
            subscriber = context.socket(zmq.SUB)
            subscriber.setsockopt(zmq.CONFLATE, 1)
            subscriber.subscribe(b"")
            subscriber.connect(ipc(endpoints.stats))
            subscribers.append(subscriber)
        while not is_over.is_set():
            for subscriber in subscribers:
                if subscriber.poll(50):
                    subscriber.recv()
        for subscriber in subscribers:
            subscriber.close(linger=0)

    thread = threading.Thread(target=receive)
    thread.start()
    try:
        yield []
    finally:
        is_over.set()
        await asyncio.to_thread(thread.join)
        context.term()


@contextlib.asynccontextmanager
async def screens(endpoints: Endpoints, count: int) -> AsyncIterator[list[int]]:
    """Real `pagetop`s, each in a terminal that is read as fast as it writes, from when all have their first picture."""
    command = [sys.executable, "-P", "-m", "pagedd.tui.app", "--runtime-dir", str(endpoints.directory)]
    processes, masters = [], []
    unpainted: dict[int, bytes] = {}
    for _ in range(count):
        master, slave = pty.openpty()
        ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", *_SCREEN, 0, 0))
        environment = os.environ | {"TERM": "xterm-256color"}
        process = subprocess.Popen(  # noqa: ASYNC220 (returns at once)
            command, stdin=slave, stdout=slave, stderr=slave, env=environment
        )
        processes.append(process)
        os.close(slave)
        masters.append(master)
        unpainted[master] = b""
        asyncio.get_running_loop().add_reader(master, _drain, master, unpainted)
    try:
        async with asyncio.timeout(_PAINTING_LIMIT_S):
            while unpainted:  # noqa: ASYNC110 (the readers empty it)
                await asyncio.sleep(0.05)
        yield [process.pid for process in processes]
        if ended := [process.returncode for process in processes if process.poll() is not None]:
            raise RuntimeError(f"a pagetop ended with status {ended[0]} while it was measured")
    finally:
        for process in processes:
            process.terminate()
            await asyncio.to_thread(process.wait)
        for master in masters:
            asyncio.get_running_loop().remove_reader(master)
            os.close(master)


def _drain(master: int, unpainted: dict[int, bytes]) -> None:
    with contextlib.suppress(OSError):  # the other end is gone
        read = os.read(master, 1 << 16)
        if master in unpainted:
            unpainted[master] += read
            if PAINTED in unpainted[master]:
                del unpainted[master]


def differences(without: Sequence[float], watched: Sequence[float]) -> list[float]:
    """Each window with subscribers over the mean of its two neighbours without, minus one."""
    return [
        2 * seconds / (before + after) - 1 for seconds, (before, after) in zip(watched, pairwise(without), strict=True)
    ]


# --- pictures ---------------------------------------------------------------------------------------------------------


class NoModel(Runner):
    """Draws the same token for everybody, at once."""

    def run(self, step: Step) -> list[Sampled]:
        step.block_copies.clear()
        return [Sampled(7) for item in step.scheduled for _ in range(item.num_draws)]


def crowded_engine(num_blocks: int) -> Engine:
    """An engine in which 64 sequences use three fifths of the blocks and a fifth is cached."""
    num_tokens = num_blocks * BLOCK_SIZE
    config = SchedulerConfig(
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_num_seqs=NUM_SEQUENCES,
        max_num_batched_tokens=num_tokens,
        max_model_len=num_tokens,
    )
    engine = Engine(NoModel(), Scheduler(config, BlockManager(num_blocks, BLOCK_SIZE)))
    for name, share, max_tokens in (("past", 0.2, 1), ("now", 0.6, 1000)):
        prompt_len = int(share * num_tokens / NUM_SEQUENCES)
        for number in range(NUM_SEQUENCES):
            engine.add(
                Request(
                    request_id=f"{name}{number}",
                    prompt_token_ids=[number if name == "now" else 100 + number] * prompt_len,
                    params=SamplingParams(max_tokens=max_tokens),
                )
            )
        engine.step()
    return engine


async def picture_costs(num_blocks: int, repeats: int) -> dict[str, float]:
    """Medians in seconds: `engine` and `front`; and `bytes` of a frame."""
    engine = crowded_engine(num_blocks)
    payload = engine_link.encode(engine_link.Snapshot(snapshot=engine.snapshot()))

    async def take() -> None:
        engine_link.encode(engine_link.Snapshot(snapshot=engine.snapshot()))

    async def snapshot() -> EngineSnapshot:
        message = engine_link.decode_from_engine(payload)
        assert isinstance(message, engine_link.Snapshot)
        return message.snapshot

    host = EngineHost(Path("/nonexistent"))
    host.state = EngineState.READY
    host.snapshot = snapshot  # type: ignore[method-assign]
    service = Service(DaemonConfig(), host)
    frame = await service.stats_frame(blocks=True)

    async def make() -> None:
        encode(await service.stats_frame(blocks=True))

    return {
        "engine": await _median_s(take, repeats),
        "front": await _median_s(make, repeats),
        "bytes": float(len(encode(frame))),
    }


async def _median_s(work: Callable[[], Awaitable[None]], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        await work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


# --- the report -------------------------------------------------------------------------------------------------------


def picture_row(num_blocks: int, costs: dict[str, float]) -> dict[str, Cell]:
    return {
        "blocks": num_blocks,
        "sequences": NUM_SEQUENCES,
        "engine ms": 1e3 * costs["engine"],
        "front ms": 1e3 * costs["front"],
        "engine %": 100 * costs["engine"] / INTERVAL_S,
        "front %": 100 * costs["front"] / INTERVAL_S,
        "frame KB": costs["bytes"] / 1e3,
    }


def step_rows(name: str, without: Sequence[Window], watched: Sequence[Window]) -> list[dict[str, Cell]]:
    rows: list[dict[str, Cell]] = []
    for measure, field in (("wall", "wall_s"), ("engine CPU", "engine_cpu_s")):
        alone, beside = ([getattr(window, field) for window in windows] for windows in (without, watched))
        low, middle, high = statistics.quantiles(differences(alone, beside), n=4)
        rows.append(
            {
                "watched by": name,
                "measure": measure,
                "rounds": len(watched),
                "step ms without": 1e3 * statistics.median(alone),
                "step ms with": 1e3 * statistics.median(beside),
                "difference %": 100 * middle,
                "first quartile %": 100 * low,
                "third quartile %": 100 * high,
            }
        )
    return rows


def share_row(name: str, without: Sequence[Window], watched: Sequence[Window]) -> dict[str, Cell]:
    front_without, front_with = (statistics.median(window.front for window in some) for some in (without, watched))
    watchers = statistics.median(window.watchers for window in watched)
    return {"watched by": name, "front %": 100 * (front_with - front_without), "watchers %": 100 * watchers}


async def run(args: argparse.Namespace) -> dict[str, list[dict[str, Cell]]]:
    """The rows of the tables: `pictures`, and with `--rounds` `steps` and `shares`."""
    pictures = [
        picture_row(num_blocks, await picture_costs(num_blocks, args.repeats)) for num_blocks in (10_000, 100_000)
    ]
    if not args.rounds:
        return {"pictures": pictures}
    without, watched = await step_windows(args, sockets if args.watchers == "sockets" else screens)
    name = f"{args.subscribers} {args.watchers}"
    shares = [share_row(name, without, watched)]
    return {"steps": step_rows(name, without, watched), "shares": shares, "pictures": pictures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default", help="name or path (default: the default model)")
    parser.add_argument("--watchers", choices=sorted(_SETTLE_S), default="sockets", help="default %(default)s")
    parser.add_argument("--subscribers", type=int, default=3, help="default %(default)s")
    parser.add_argument("--sequences", type=int, default=8, help="that decode (default %(default)s)")
    parser.add_argument("--num-threads", type=int, help="of the engine (default: its own)")
    parser.add_argument("--rounds", type=int, default=8, help="0 leaves the steps out (default %(default)s)")
    parser.add_argument("--window", type=float, default=1.0, metavar="S", help="default %(default)s")
    parser.add_argument("--repeats", type=int, default=50, help="pictures of each size (default %(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the line of JSON there")
    args = parser.parse_args()

    tables = asyncio.run(run(args))
    for name in ("steps", "shares"):
        if name in tables:
            print(table(tables[name]), end="\n\n")
    print_report("stats_feed", tables["pictures"], tables, output=args.output)


if __name__ == "__main__":
    main()
