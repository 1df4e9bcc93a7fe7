"""What pagetops cost the steps that they show.

    python -P -m pagedd.bench.watched_steps --output FILE
    python -P -m pagedd.bench.watched_steps --output FILE --append

A daemon decodes `--sequences` answers at a time. Real pagetops, in terminals of 160 × 48, are attached and detached in
turn (`detachable_pagetop.py`): a round is a window with and one without them, side by side, in random order, so that
what drifts falls on both. A round gives one difference; the table has the median of all rounds and the interval in
which it lies with 95 % confidence (bootstrap over rounds). `--append` counts the rounds that FILE has already.

    step        the engine's own clock: from forming a step to having its tokens
    wall        wall time over steps, pictures between them included
    front %     of one core, of the front process, with pagetops less that without
    pagetops %  of one core, of all together
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import pty
import random
import signal
import statistics
import struct
import subprocess
import sys
import termios
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from fcntl import ioctl
from pathlib import Path

import psutil

from pagedd.bench.daemon_process import running_daemon
from pagedd.bench.pagetop import PAINTED
from pagedd.bench.report import Cell, print_report
from pagedd.client.aio import AsyncClient
from pagedd.client.endpoints import Endpoints

BLOCK_SIZE = 16
MAX_TOKENS = 600  # of an answer at most: short, so that a step costs about the same in every window
_WARM_UP_S = 6.0  # until the answers are of all lengths
_SETTLE_S = 0.6  # a newcomer's first picture is not what watching costs
_SCREEN = (48, 160)  # rows, columns
_PAINTING_LIMIT_S = 60.0
_RESAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class Window:
    """Seconds a step, and shares of one core."""

    step_s: float
    wall_s: float
    front: float
    pagetops: float


@dataclass(frozen=True, slots=True)
class Round:
    """Two windows side by side."""

    alone: Window
    watched: Window


async def measure(args: argparse.Namespace) -> list[Round]:
    num_blocks = max(args.blocks, args.sequences * (MAX_TOKENS // BLOCK_SIZE + 2))
    flags = ["--model", args.model, "--num-blocks", str(num_blocks), "--max-num-seqs", str(args.sequences)]
    # A step is then a token of each, whatever they write.
    flags += ["--num-speculative-tokens", "0"]
    async with running_daemon(flags) as daemon:
        directory = daemon.http_socket.parent
        async with AsyncClient(directory, timeout_s=60.0) as client, pagetops(directory, args.pagetops) as pids:
            load = [asyncio.ensure_future(_answer(client, number)) for number in range(args.sequences)]
            await asyncio.sleep(_WARM_UP_S)
            rounds: list[Round] = []
            is_attached = True
            for _ in range(args.rounds):
                windows = {}
                for is_watched in random.sample([False, True], 2):
                    for pid in pids if is_watched != is_attached else ():
                        os.kill(pid, signal.SIGCONT if is_watched else signal.SIGUSR1)
                    is_attached = is_watched
                    await asyncio.sleep(_SETTLE_S)
                    _check_attached(pids, is_watched)
                    windows[is_watched] = await _window(client, daemon.pid, pids, args.window)
                rounds.append(Round(alone=windows[False], watched=windows[True]))
            for task in load:
                task.cancel()
            await asyncio.gather(*load, return_exceptions=True)
    return rounds


async def _answer(client: AsyncClient, number: int) -> None:
    """One answer after another."""
    for turn in itertools.count():
        # Of different lengths, so that they do not all begin and end together.
        length = MAX_TOKENS * (4 + number % 5) // 8
        await client.generate(f"Story {number}.{turn}:", max_tokens=length, ignore_eos=True, seed=number).result()


async def _window(client: AsyncClient, front: int, watchers: Sequence[int], seconds: float) -> Window:
    """Each of the two questions costs a picture, in every window alike."""

    def spent() -> tuple[float, float]:
        return cpu_s(front), sum(map(cpu_s, watchers))

    first, before = await client.stats(), spent()
    await asyncio.sleep(seconds)
    last, after = await client.stats(), spent()

    def gained(name: str) -> float:
        return (last.figures[name] or 0.0) - (first.figures[name] or 0.0)

    num_steps, wall_s = gained("steps_total"), last.time_s - first.time_s
    step_s = sum(gained(name) for name in last.figures if name.startswith("step_seconds_"))
    front_s, watchers_s = (late - early for early, late in zip(before, after, strict=True))
    return Window(step_s / num_steps, wall_s / num_steps, front_s / wall_s, watchers_s / wall_s)


def cpu_s(pid: int) -> float:
    """Processor seconds that all threads of a process have had, to the nanosecond."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


# --- pagetops ---------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def pagetops(directory: Path, count: int) -> AsyncIterator[list[int]]:
    """Each in a terminal that is read as fast as it writes; the process ids once all have their first picture."""
    command = [sys.executable, "-P", "-m", "pagedd.bench.detachable_pagetop", str(Endpoints(directory).directory)]
    processes, masters = [], []
    unpainted: dict[int, bytes] = {}
    for _ in range(count):
        master, slave = pty.openpty()
        ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", *_SCREEN, 0, 0))
        environment = os.environ | {"TERM": "xterm-256color"}
        process = subprocess.Popen(  # noqa: ASYNC220 (returns at once)
            command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
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
    finally:
        for process in processes:
            process.kill()
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


def _check_attached(pids: Sequence[int], is_watched: bool) -> None:
    """Raises `RuntimeError` for a pagetop that is not what the window is said to have."""
    for pid in pids:
        state = psutil.Process(pid).status()
        if (state == psutil.STATUS_STOPPED) is is_watched or state == psutil.STATUS_ZOMBIE:
            raise RuntimeError(f"pagetop {pid} is {state} in a window {'with' if is_watched else 'without'} pagetops")


# --- the report -------------------------------------------------------------------------------------------------------


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median between the bounds of its 95 % confidence interval: (low, median, high)."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    return medians[_RESAMPLES * 25 // 1000], statistics.median(values), medians[_RESAMPLES * 975 // 1000]


def step_row(measure: str, field: str, rounds: Sequence[Round]) -> dict[str, Cell]:
    alone, watched = ([getattr(getattr(one, side), field) for one in rounds] for side in ("alone", "watched"))
    low, middle, high = median_interval([late / early - 1 for early, late in zip(alone, watched, strict=True)])
    return {
        "measure": measure,
        "rounds": len(rounds),
        "ms alone": 1e3 * statistics.median(alone),
        "ms watched": 1e3 * statistics.median(watched),
        "difference %": 100 * middle,
        "from %": 100 * low,
        "to %": 100 * high,
    }


def shares(rounds: Sequence[Round]) -> dict[str, Cell]:
    return {
        "front %": 100 * statistics.median(one.watched.front - one.alone.front for one in rounds),
        "pagetops %": 100 * statistics.median(one.watched.pagetops for one in rounds),
    }


def kept_rounds(path: Path) -> list[Round]:
    kept = json.loads(path.read_text())["kept"]
    return [Round(Window(**one["alone"]), Window(**one["watched"])) for one in kept]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default", help="name or path (default: the default model)")
    parser.add_argument("--pagetops", type=int, default=3, help="default %(default)s")
    parser.add_argument("--sequences", type=int, default=8, help="that decode (default %(default)s)")
    parser.add_argument("--blocks", type=int, default=10_000, help="of the pool (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="default %(default)s")
    parser.add_argument("--window", type=float, default=2.0, metavar="S", help="default %(default)s")
    parser.add_argument("--append", action="store_true", help="to the rounds that the output has")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the line of JSON there")
    args = parser.parse_args()
    if args.append and args.output is None:
        parser.error("--append needs --output FILE, which has the rounds of before")

    rounds = [*(kept_rounds(args.output) if args.append else []), *asyncio.run(measure(args))]
    rows = [step_row("step", "step_s", rounds), step_row("wall", "wall_s", rounds)]
    setting = {name: getattr(args, name) for name in ("pagetops", "sequences", "blocks", "window")}
    figures = {"setting": setting, "steps": rows, "shares": shares(rounds), "kept": [asdict(one) for one in rounds]}
    print_report("watched_steps", rows, figures, output=args.output)


if __name__ == "__main__":
    main()
