"""What one picture costs the steps beside it: what pagetops cost, counted at the moments at which they draw.

    python -P -m pagedd.bench.watched_pictures --output FILE
    python -P -m pagedd.bench.watched_pictures --output FILE --append

A daemon decodes `--sequences` answers at a time, beside real pagetops in terminals of 160 × 48. Now and then a picture
is asked for: a subscription to a topic that nobody publishes has the daemon publish one to those who look. From then on
for a tenth of a second, tokens that did not come are what the picture took from the model; the tenths just before and
after say how many would have come. `watched_steps.py` compares whole windows with and without pagetops instead, which
has the same in it and far more noise.

    lost ms        of the model's time, for one picture: made, sent and drawn by all; the mean
    lost %         of the model's time, at the pace of a daemon whose model has all cores: a picture in two seconds; and
                   the interval in which it lies with 95 % confidence (bootstrap over pictures)
    pagetops ms    processor time of all pagetops together for one picture
    between %      of one core, of all pagetops, while there is no picture
"""

import argparse
import asyncio
import bisect
import itertools
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import zmq

from pagedd.bench.daemon_process import running_daemon
from pagedd.bench.report import Cell, print_report
from pagedd.bench.watching import cpu_s, flags, interval, kept, make_parser, pagetops, parse
from pagedd.client.aio import AsyncClient
from pagedd.client.endpoints import Endpoints, ipc
from pagedd.daemon.stats_feed import SATURATED_INTERVAL_S

# Few prompts, whose steps are long; short enough for any model's context.
_ANSWER_TOKENS = 1800
_SETTLE_S = 2.0  # until the daemon knows that its model has all cores
# Seconds after a picture was asked for: its work is over long before the end of the first.
DRAWN = (0.0, 0.1)
UNDISTURBED = ((-0.1, 0.0), (0.2, 0.3))
# When processor time is read, which takes some itself: outside of all these.
_READ_BEFORE_S, _READ_AFTER_S = -0.15, 0.15
_UNTIL_NEXT_S = (0.2, 0.3)
# Of a core. A picture beside somebody else's work says nothing.
_MAX_OTHERS = 0.15


@dataclass(frozen=True, slots=True)
class Picture:
    """Seconds: of the model's time, of pagetops' processor time for it, and of theirs in a second without one."""

    lost_s: float
    step_s: float
    pagetops_s: float
    between: float


@dataclass(frozen=True, slots=True)
class Moment:
    """A picture was asked for at `asked_s`. Pagetops have had `spent` processor seconds by the instants of `read_s`.

    `others` is what the rest of the machine did meanwhile, in cores.
    """

    asked_s: float
    read_s: tuple[float, float]
    spent: tuple[float, float]
    others: float


async def measure(args: argparse.Namespace) -> list[Picture]:
    pictures: list[Picture] = []
    async with running_daemon(flags(args, _ANSWER_TOKENS)) as daemon:
        directory = daemon.http_socket.parent
        async with AsyncClient(directory, timeout_s=60.0) as client, pagetops(directory, args.pagetops) as pids:
            ours = [os.getpid(), daemon.pid, *(child.pid for child in psutil.Process(daemon.pid).children())]

            def spent() -> tuple[float, float]:
                watching = sum(map(cpu_s, pids))
                times = psutil.cpu_times()
                return watching, watching + sum(map(cpu_s, ours)) + times.idle + times.iowait

            bell = Bell(directory)
            end_s = time.monotonic() + args.seconds
            while time.monotonic() < end_s:
                pictures += await _batch(client, bell, args.sequences, spent, end_s)
            bell.close()
    return pictures


async def _batch(
    client: AsyncClient, bell: "Bell", num_sequences: int, spent: Callable[[], tuple[float, float]], end_s: float
) -> list[Picture]:
    """Answers that begin and end together, and pictures while all of them decode.

    `spent` says the processor seconds so far of pagetops, and those that are nobody else's.
    """
    tokens_s: list[float] = []

    async def follow() -> None:
        """A token of one of them is a step of all."""
        async for delta in client.generate("Story 0:", max_tokens=_ANSWER_TOKENS, ignore_eos=True, seed=0):
            tokens_s.extend([time.perf_counter()] * len(delta.token_ids))

    others = [
        client.generate(f"Story {number}:", max_tokens=_ANSWER_TOKENS, ignore_eos=True, seed=number).result()
        for number in range(1, num_sequences)
    ]
    answers = asyncio.gather(follow(), *others)
    moments: list[Moment] = []
    await asyncio.sleep(_SETTLE_S)
    while not answers.done() and time.monotonic() < end_s:
        before_s, before = time.perf_counter(), spent()
        await asyncio.sleep(-_READ_BEFORE_S)
        asked_s = time.perf_counter()
        bell.ring()
        await asyncio.sleep(_READ_AFTER_S)
        after_s, after = time.perf_counter(), spent()
        foreign = (os.cpu_count() or 1) - (after[1] - before[1]) / (after_s - before_s)
        moments.append(Moment(asked_s, (before_s, after_s), (before[0], after[0]), foreign))
        await asyncio.wait([answers], timeout=random.uniform(*_UNTIL_NEXT_S))
    answers.cancel()
    await asyncio.gather(answers, return_exceptions=True)
    return pictures_of(moments, tokens_s)


def pictures_of(moments: Sequence[Moment], tokens_s: Sequence[float]) -> list[Picture]:
    """What pictures cost that had the machine, tokens before, during and after them, and another one after them.

    Args:
        tokens_s: when each came, in order.
    """
    pictures = []
    for moment, following in itertools.pairwise(moments):
        first_s, last_s = moment.asked_s + UNDISTURBED[0][0], moment.asked_s + UNDISTURBED[-1][1]
        if moment.others > _MAX_OTHERS or not tokens_s or tokens_s[0] >= first_s or tokens_s[-1] <= last_s:
            continue

        def tokens(span: tuple[float, float], asked_s: float = moment.asked_s) -> float:
            return _progress(tokens_s, asked_s + span[1]) - _progress(tokens_s, asked_s + span[0])

        step_s = sum(end - begin for begin, end in UNDISTURBED) / sum(map(tokens, UNDISTURBED))
        lost_s = DRAWN[1] - DRAWN[0] - tokens(DRAWN) * step_s
        idle_s = following.read_s[0] - moment.read_s[1]
        between = (following.spent[0] - moment.spent[1]) / idle_s
        pictures.append(Picture(lost_s, step_s, moment.spent[1] - moment.spent[0], between))
    return pictures


def _progress(tokens_s: Sequence[float], at_s: float) -> float:
    """Tokens until then; the one under way counts by its share of time."""
    after = bisect.bisect(tokens_s, at_s)
    return after + (at_s - tokens_s[after - 1]) / (tokens_s[after] - tokens_s[after - 1])


class Bell:
    """Has the daemon publish a picture now, as it does for whoever begins to look; gets none itself."""

    def __init__(self, directory: Path) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.connect(ipc(Endpoints(directory).stats))

    def ring(self) -> None:
        self._socket.setsockopt(zmq.SUBSCRIBE, b"no such topic")
        self._socket.setsockopt(zmq.UNSUBSCRIBE, b"no such topic")

    def close(self) -> None:
        self._context.destroy(linger=0)


# --- the report -------------------------------------------------------------------------------------------------------


def picture_row(pictures: Sequence[Picture]) -> dict[str, Cell]:
    low, mean, high = interval([picture.lost_s for picture in pictures], statistics.fmean)
    return {
        "pictures": len(pictures),
        "step ms": 1e3 * statistics.median(picture.step_s for picture in pictures),
        "lost ms": 1e3 * mean,
        "lost %": 100 * mean / SATURATED_INTERVAL_S,
        "from %": 100 * low / SATURATED_INTERVAL_S,
        "to %": 100 * high / SATURATED_INTERVAL_S,
        "pagetops ms": 1e3 * statistics.fmean(picture.pagetops_s for picture in pictures),
        "between %": 100 * statistics.fmean(picture.between for picture in pictures),
    }


def main() -> None:
    parser = make_parser(__doc__, "pictures")
    parser.add_argument("--seconds", type=float, default=60.0, help="of measuring (default %(default)s)")
    args = parse(parser)

    pictures = [*(kept(args.output, Picture) if args.append else []), *asyncio.run(measure(args))]
    if not pictures:
        sys.exit("no picture counts: others kept the machine busy all along; try again when it is quiet")
    rows = [picture_row(pictures)]
    setting = {name: getattr(args, name) for name in ("pagetops", "sequences", "blocks")}
    figures = {"setting": setting, "pictures": rows, "kept": [asdict(picture) for picture in pictures]}
    print_report("watched_pictures", rows, figures, output=args.output)


if __name__ == "__main__":
    main()
