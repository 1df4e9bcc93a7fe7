"""The making of one picture of a large pool. What it does to the steps beside it: `watched_steps.py`.

    python -P -m pagedd.bench.stats_feed

The engine's bookkeeping with 64 sequences over pools of several sizes, without a model, and the front's part beside it.
Medians, in ms.

    engine ms   copying blocks, ages, fills and block tables, and encoding them: what delays a step
    front ms    decoding, building the frame and encoding it once for all subscribers
    engine %    share of one core at four pictures a second; front % likewise
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from pagedd.bench.report import Cell, print_report
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=50, help="pictures of each size (default %(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the line of JSON there")
    args = parser.parse_args()
    rows = [
        picture_row(num_blocks, asyncio.run(picture_costs(num_blocks, args.repeats)))
        for num_blocks in (10_000, 100_000)
    ]
    print_report("stats_feed", rows, {"pictures": rows}, output=args.output)


if __name__ == "__main__":
    main()
