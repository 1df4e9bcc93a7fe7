"""What scheduling costs by itself: the real scheduler and block pool, a model that draws at once, a simulated clock.

    python -P -m pagedd.bench.scheduler --rates 1000,5000

Requests arrive at a steady rate while steps of `--step-ms` go by, as a device would take them; only the time that
`add`, `schedule` and `commit` take is measured. Prompts are random, so every block is hashed and indexed, and nothing
is found. Afterwards the same with other numbers of seats, and with pools from 10^3 to 10^6 blocks.

    core     measured time / simulated time, in percent of one core
    step     median and 99th percentile of schedule and commit together
    running  sequences with a seat, on average
"""

import argparse
import itertools
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from pagedd.bench.load import percentile
from pagedd.bench.report import Cell, print_report
from pagedd.engine.config import SchedulerConfig
from pagedd.engine.kv.block_manager import BlockManager
from pagedd.engine.request import Request
from pagedd.engine.sampling_params import SamplingParams
from pagedd.engine.scheduler import Scheduler
from pagedd.engine.step import Sampled

BLOCK_SIZE = 16
NUM_PROMPT_TOKENS = 64
SEATS = (16, 64, 256, 1024)
POOLS = (1_000, 10_000, 100_000, 1_000_000)
TARGETS = {"core %": 25.0, "step ms": 1.0}  # at 1 000 requests a second and 256 running


@dataclass(frozen=True, slots=True)
class Cost:
    """One simulation; defined in this module's docstring. Seconds."""

    rate: float
    num_seats: int
    num_blocks: int
    core_share: float
    step_p50_s: float
    step_p99_s: float
    mean_running: float

    def row(self) -> dict[str, Cell]:
        return {
            "requests/s": round(self.rate),
            "seats": self.num_seats,
            "blocks": self.num_blocks,
            "running": round(self.mean_running, 1),
            "core %": round(100 * self.core_share, 1),
            "step ms": round(1e3 * self.step_p50_s, 3),
            "p99 ms": round(1e3 * self.step_p99_s, 3),
        }


def simulate(rate: float, num_seats: int, num_blocks: int, *, step_s: float, num_steps: int, seed: int = 7) -> Cost:
    """`num_steps` steps with all seats taken: outputs are so long that the arrivals keep them so.

    Raises:
        RuntimeError: the pool is too small for all seats.
    """
    num_output_tokens = max(2, round(num_seats / (rate * step_s)))
    draw, now, names = random.Random(seed), 0.0, itertools.count()
    config = SchedulerConfig(
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_num_seqs=num_seats,
        max_num_batched_tokens=1 << 20,
        max_model_len=NUM_PROMPT_TOKENS + num_output_tokens,
    )
    scheduler = Scheduler(config, BlockManager(num_blocks, BLOCK_SIZE, clock=lambda: now), clock=lambda: now)

    def arrive(count: int) -> list[Request]:
        params = SamplingParams(max_tokens=num_output_tokens)
        prompts = ([draw.randrange(50_000) for _ in range(NUM_PROMPT_TOKENS)] for _ in range(count))
        return [Request(request_id=str(next(names)), prompt_token_ids=prompt, params=params) for prompt in prompts]

    steps: list[float] = []
    running: list[int] = []
    owed = measured = 0.0
    num_warmup_steps = num_output_tokens + 5
    for number in range(num_warmup_steps + num_steps):
        owed += rate * step_s
        requests = arrive(int(owed))
        owed -= len(requests)
        started = time.perf_counter()
        for request in requests:
            scheduler.add(request)
        added = time.perf_counter()
        step = scheduler.schedule()
        scheduled = time.perf_counter()
        sampled = [Sampled(7) for item in step.scheduled for _ in range(item.num_draws)]
        drawn = time.perf_counter()
        scheduler.commit(step, sampled)
        seconds = scheduled - added + time.perf_counter() - drawn
        if number >= num_warmup_steps:
            steps.append(seconds)
            running.append(len(step.scheduled))
            measured += seconds + added - started
        now += step_s
    if statistics.mean(running) < 0.9 * num_seats:
        raise RuntimeError(f"{num_blocks} blocks are too few for {num_seats} seats; give the pool more")
    return Cost(
        rate=rate,
        num_seats=num_seats,
        num_blocks=num_blocks,
        core_share=measured / (num_steps * step_s),
        step_p50_s=statistics.median(steps),
        step_p99_s=percentile(steps, 0.99) or 0.0,
        mean_running=statistics.mean(running),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="1000,5000", help="requests a second (default %(default)s)")
    parser.add_argument("--step-ms", type=float, default=10.0, help="of the simulated device (default %(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="measured steps (default %(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the line of JSON there")
    args = parser.parse_args()
    rates = [float(rate) for rate in args.rates.split(",")]

    def cost(rate: float, num_seats: int, num_blocks: int) -> Cost:
        return simulate(rate, num_seats, num_blocks, step_s=args.step_ms / 1e3, num_steps=args.steps)

    tables = {
        "by_rate": [cost(rate, 256, 10_000).row() for rate in rates],
        # Each sequence lives through as many steps, whatever the seats.
        "by_seats": [cost(rates[0] * seats / 256, seats, 100_000).row() for seats in SEATS],
        "by_pool": [cost(rates[0] * 64 / 256, 64, num_blocks).row() for num_blocks in POOLS],
    }
    print_report(
        "scheduler",
        [row for rows in tables.values() for row in rows],
        tables | {"targets": TARGETS},
        output=args.output,
    )


if __name__ == "__main__":
    main()
