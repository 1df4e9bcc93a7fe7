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
import itertools
import os
import random
import signal
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import psutil

from pagedd.bench.daemon_process import running_daemon
from pagedd.bench.report import Cell, print_report
from pagedd.bench.watching import cpu_s, flags, interval, kept, make_parser, pagetops, parse
from pagedd.client.aio import AsyncClient

MAX_TOKENS = 600  # of an answer at most: short, so that a step costs about the same in every window
_WARM_UP_S = 6.0  # until the answers are of all lengths
_SETTLE_S = 0.6  # a newcomer's first picture is not what watching costs


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
    async with running_daemon(flags(args, MAX_TOKENS)) as daemon:
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

    num_steps, wall_s = gained("steps_total"), last.uptime_s - first.uptime_s
    step_s = sum(gained(name) for name in last.figures if name.startswith("step_seconds_"))
    front_s, watchers_s = (late - early for early, late in zip(before, after, strict=True))
    return Window(step_s / num_steps, wall_s / num_steps, front_s / wall_s, watchers_s / wall_s)


def _check_attached(pids: Sequence[int], is_watched: bool) -> None:
    """Raises `RuntimeError` for a pagetop that is not what the window is said to have."""
    for pid in pids:
        state = psutil.Process(pid).status()
        if (state == psutil.STATUS_STOPPED) is is_watched or state == psutil.STATUS_ZOMBIE:
            raise RuntimeError(f"pagetop {pid} is {state} in a window {'with' if is_watched else 'without'} pagetops")


# --- the report -------------------------------------------------------------------------------------------------------


def step_row(measure: str, field: str, rounds: Sequence[Round]) -> dict[str, Cell]:
    alone, watched = ([getattr(getattr(one, side), field) for one in rounds] for side in ("alone", "watched"))
    differences = [late / early - 1 for early, late in zip(alone, watched, strict=True)]
    low, middle, high = interval(differences, statistics.median)
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


def main() -> None:
    parser = make_parser(__doc__, "rounds")
    parser.add_argument("--rounds", type=int, default=20, help="default %(default)s")
    parser.add_argument("--window", type=float, default=2.0, metavar="S", help="default %(default)s")
    args = parse(parser)

    rounds = [*(kept(args.output, Round) if args.append else []), *asyncio.run(measure(args))]
    rows = [step_row("step", "step_s", rounds), step_row("wall", "wall_s", rounds)]
    setting = {name: getattr(args, name) for name in ("pagetops", "sequences", "blocks", "window")}
    figures = {"setting": setting, "steps": rows, "shares": shares(rounds), "kept": [asdict(one) for one in rounds]}
    print_report("watched_steps", rows, figures, output=args.output)


if __name__ == "__main__":
    main()
