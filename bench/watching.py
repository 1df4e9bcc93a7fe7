"""What `watched_pictures.py` and `watched_steps.py` share: pagetops that watch, options, and how sure a figure is.

Knows neither what is measured nor what comes of it.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from pagedd.bench.pagetop import COLUMNS, LINES, PAINTED
from pagedd.bench.terminal import start_in_terminal

_BLOCK_SIZE = 16
_PAINTING_LIMIT_S = 60.0
_RESAMPLES = 10_000

Kept = TypeVar("Kept")


def make_parser(description: str | None, units: str) -> argparse.ArgumentParser:
    """The options of both; `units` are what is counted."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default", help="name or path (default: the default model)")
    parser.add_argument("--pagetops", type=int, default=3, help="default %(default)s")
    parser.add_argument("--sequences", type=int, default=8, help="that decode (default %(default)s)")
    parser.add_argument("--blocks", type=int, default=10_000, help="of the pool (default %(default)s)")
    parser.add_argument("--append", action="store_true", help=f"to the {units} that the output has")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the line of JSON there")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Ends the process for `--append` to nothing."""
    args = parser.parse_args()
    if args.append and args.output is None:
        parser.error("--append needs --output FILE, which has those of before")
    return args


def flags(args: argparse.Namespace, answer_tokens: int) -> list[str]:
    """Of a daemon that decodes all sequences at a time, each of at most `answer_tokens` tokens after a short prompt."""
    num_blocks = max(args.blocks, args.sequences * (answer_tokens // _BLOCK_SIZE + 2))
    shape = ["--model", args.model, "--num-blocks", str(num_blocks), "--max-num-seqs", str(args.sequences)]
    # A step is then a token of each, whatever they write.
    return [*shape, "--num-speculative-tokens", "0"]


def cpu_s(pid: int) -> float:
    """Processor seconds that all threads of a process have had, to the nanosecond."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


@contextlib.asynccontextmanager
async def pagetops(directory: Path, count: int) -> AsyncIterator[list[int]]:
    """Each in a terminal that is read as fast as it writes; the process ids once all have their first picture."""
    command = [sys.executable, "-P", "-m", "pagedd.bench.detachable_pagetop", str(directory)]
    processes, terminals = [], []
    unpainted: dict[int, bytes] = {}
    for _ in range(count):
        process, terminal = start_in_terminal(command, LINES, COLUMNS)
        processes.append(process)
        terminals.append(terminal)
        unpainted[terminal] = b""
        asyncio.get_running_loop().add_reader(terminal, _drain, terminal, unpainted)
    try:
        async with asyncio.timeout(_PAINTING_LIMIT_S):
            while unpainted:  # noqa: ASYNC110 (the readers empty it)
                await asyncio.sleep(0.05)
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
            await asyncio.to_thread(process.wait)
        for terminal in terminals:
            asyncio.get_running_loop().remove_reader(terminal)
            os.close(terminal)


def _drain(terminal: int, unpainted: dict[int, bytes]) -> None:
    with contextlib.suppress(OSError):  # the other end is gone
        read = os.read(terminal, 1 << 16)
        if terminal in unpainted:
            unpainted[terminal] += read
            if PAINTED in unpainted[terminal]:
                del unpainted[terminal]


# --- the report -------------------------------------------------------------------------------------------------------


def interval(values: Sequence[float], statistic: Callable[[Sequence[float]], float]) -> tuple[float, float, float]:
    """A statistic of `values` between the bounds of its 95 % confidence interval (bootstrap): (low, middle, high)."""
    draw = random.Random(0)
    drawn = sorted(statistic(draw.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    return drawn[_RESAMPLES * 25 // 1000], statistic(values), drawn[_RESAMPLES * 975 // 1000]


def kept(path: Path, kind: type[Kept]) -> list[Kept]:
    """What an earlier report counted, as it was written there."""
    return [msgspec.convert(one, kind) for one in json.loads(path.read_text())["kept"]]
