"""Three published comparisons of serving systems, run again at this machine's size on our own engine.

    python -P -m pagedd.bench.cases --model PATH            (or: make bench-cases)

Each compares the engine with itself without one mechanism, over one loaded model. The two sides take turns, each round
with users of its own, and the medians of their rounds are compared. Users ask again at once when they have their
answer; text is random, and nobody guesses at tokens (`num_speculative_tokens` is 0), so that what is gained is the
mechanism's. `docs/cases.md` says what the figures mean for a user, and how little is known of the published ones.

    paging          64 users, prompts of 100 and outputs of 150 tokens on average, both of exponential length. The pool
                    holds two slabs of the model's whole context. Off: each sequence takes such a slab.
    batching        32 seats, 48 users, outputs of 48 tokens on average. Off: static batches, whose rows are all
                    computed until the longest is done, and whose answers then come together.
    prefix caching  48 users in conversations of 4 turns after the same system prompt of 200 tokens; the pool holds 16
                    of them side by side. Off: --no-enable-prefix-caching.

    concurrency   sequences that hold a seat, mean over the measured steps
    memory that holds tokens
                  slots of the pool that hold a token, over all that it has, mean over the steps
    utilisation   tokens that somebody asked for / (steps × seats)
    KV a request  used blocks × their bytes / running sequences; what is shared counts once
    first token   median time from asking; of those whose first token came in the measured time
"""

import argparse
import json
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pagedd.bench.case_gain import Gain
from pagedd.bench.case_pictures import draw_pictures
from pagedd.bench.load import percentile
from pagedd.bench.mechanisms_off import SlabManager, StaticBatches
from pagedd.bench.report import print_report
from pagedd.daemon.models import pull_model
from pagedd.daemon.tune.users import Asked, Measured, Serving, User, measure
from pagedd.engine.config import EngineConfig, SchedulerConfig
from pagedd.engine.create import create_runner
from pagedd.engine.engine import Engine
from pagedd.engine.kv.block_manager import BlockManager
from pagedd.engine.scheduler import Scheduler

POOL_TOKENS = 16384
MAX_SEATS = 64
SYSTEM_PROMPT_TOKENS = 200
TURNS = 4
# Of a conversation with its answer half written, on average.
CONVERSATION_TOKENS = 300

Users = Callable[[random.Random], list[User]]
Figure = Callable[[Measured], float]


@dataclass(frozen=True, slots=True)
class Rounds:
    """What both sides of a case measured, round by round."""

    off: list[Measured]
    on: list[Measured]

    def medians(self, figure: Figure) -> tuple[float, float]:
        """Without the mechanism, and with it."""
        return _median(map(figure, self.off)), _median(map(figure, self.on))


class Bench:
    """One loaded model. Each run has a scheduler and a pool of its own over the same memory."""

    def __init__(self, config: EngineConfig, *, seconds: float, warmup_s: float, num_rounds: int) -> None:
        self._runner, self.info = create_runner(config, lambda share, what: None)
        self.block_size = config.block_size
        self._seconds = seconds
        self._warmup_s = warmup_s
        self._num_rounds = num_rounds

    def blocks(self, num_tokens: int = POOL_TOKENS, *, enable_prefix_caching: bool = True) -> BlockManager:
        """A pool, empty, for so many tokens."""
        num_blocks = num_tokens // self.block_size
        return BlockManager(
            num_blocks,
            self.block_size,
            enable_prefix_caching=enable_prefix_caching,
            open_pages=self._runner.open_pages,
        )

    def slabs(self, num_slabs: int, slab_tokens: int) -> SlabManager:
        """The same for slabs of so many tokens."""
        return SlabManager(num_slabs, self.block_size, slab_tokens, self._runner.open_pages)

    def engine(self, blocks: BlockManager, num_seats: int = MAX_SEATS) -> Engine:
        config = SchedulerConfig(
            block_size=self.block_size,
            num_blocks=blocks.pool.num_blocks,
            max_num_seqs=num_seats,
            max_num_batched_tokens=self.info.max_num_batched_tokens,
            max_model_len=self.info.max_model_len,
            enable_prefix_caching=blocks.enable_prefix_caching,
        )
        return Engine(self._runner, Scheduler(config, blocks))

    def take_turns(self, off: Callable[[], Serving], on: Callable[[], Serving], users: Users) -> Rounds:
        """Raises `RuntimeError` when a request fails."""
        rounds = Rounds([], [])
        for number in range(self._num_rounds):
            for side, make_engine in ((rounds.off, off), (rounds.on, on)):
                who = users(random.Random(number))
                measured = measure(make_engine(), who, seconds=self._seconds, warmup_s=self._warmup_s)
                if measured.error:
                    raise RuntimeError(measured.error)
                side.append(measured)
        return rounds


def paging(bench: Bench) -> list[Gain]:
    slab_tokens = bench.info.max_model_len
    num_slabs = POOL_TOKENS // slab_tokens
    rounds = bench.take_turns(
        lambda: bench.engine(bench.slabs(num_slabs, slab_tokens)),
        lambda: bench.engine(bench.blocks()),
        lambda draw: [mixed_lengths(random.Random(draw.random()), slab_tokens) for _ in range(MAX_SEATS)],
    )
    memory_use = rounds.medians(lambda m: 100 * m.sum_live_tokens / m.num_steps / POOL_TOKENS)
    return [
        Gain("concurrency", "sequences", (8, 32), rounds.medians(lambda m: m.mean_running), target=4.0),
        Gain("memory that holds tokens", "%", (68, 94), memory_use),
        Gain("first token", "ms", (850, 420), rounds.medians(_first_token_ms), is_less_better=True),
        Gain("throughput", "tokens/s", (1200, 3800), rounds.medians(lambda m: m.output_tokens_per_s), target=2.5),
    ]


def batching(bench: Bench, num_seats: int = 32, num_users: int = 48) -> list[Gain]:
    def engine() -> Engine:
        return bench.engine(bench.blocks(), num_seats)

    rounds = bench.take_turns(
        lambda: StaticBatches(engine(), num_seats),
        engine,
        lambda draw: [short_prompts(random.Random(draw.random())) for _ in range(num_users)],
    )
    utilisation = rounds.medians(lambda m: 100 * m.num_output_tokens / m.num_steps / num_seats)
    return [
        Gain("utilisation", "%", (45, 92), utilisation),
        Gain("requests", "1/s", (15, 42), rounds.medians(lambda m: m.requests_per_s), target=2.0),
        Gain("P95 latency", "s", (3.2, 1.8), rounds.medians(_p95_latency_s), is_less_better=True),
    ]


def prefix_caching(bench: Bench, num_users: int = 48) -> list[Gain]:
    num_tokens = 16 * CONVERSATION_TOKENS
    block_mb = bench.info.kv_bytes_per_token * bench.block_size / 1e6
    system = tokens(random.Random(0), SYSTEM_PROMPT_TOKENS)
    rounds = bench.take_turns(
        lambda: bench.engine(bench.blocks(num_tokens, enable_prefix_caching=False)),
        lambda: bench.engine(bench.blocks(num_tokens)),
        lambda draw: [conversations(system, random.Random(draw.random())) for _ in range(num_users)],
    )
    kv_mb = rounds.medians(lambda m: m.sum_used_blocks * block_mb / m.sum_running)
    first_token_ms = rounds.medians(_first_token_ms)
    return [
        # 60 % less is two and a half times quicker.
        Gain("first token", "ms", (380, 120), first_token_ms, target=2.5, is_less_better=True),
        Gain("KV a request", "MB", (1200, 400), kv_mb, is_less_better=True),
        Gain("concurrency", "sequences", (16, 40), rounds.medians(lambda m: m.mean_running), target=2.5),
    ]


CASES = {"paging": paging, "batching": batching, "prefix caching": prefix_caching}
# The default, but where most of the KV is a prefix of 200 tokens, which fill 25 blocks of 8 and 12 and a half of 16.
BLOCK_SIZES = {"paging": 16, "batching": 16, "prefix caching": 8}


# Users


def tokens(draw: random.Random, number: int) -> list[int]:
    """Random ids; those below 10 tend to be special."""
    return [draw.randrange(10, 49152) for _ in range(number)]


def mixed_lengths(draw: random.Random, max_model_len: int) -> User:
    while True:
        num_prompt = min(1 + int(draw.expovariate(1 / 100)), max_model_len // 2)
        num_output = min(1 + int(draw.expovariate(1 / 150)), max_model_len // 2)
        yield Asked(tokens(draw, num_prompt), num_output)


def short_prompts(draw: random.Random) -> User:
    """32 tokens each; outputs vary by little more than half of their mean, as lengths of answers do at least."""
    while True:
        yield Asked(tokens(draw, 32), 1 + int(draw.gammavariate(3, 16)))


def conversations(system: Sequence[int], draw: random.Random) -> User:
    """One after the other for ever, about 18 tokens asked and 24 answered in each turn; from the middle of the first,
    or all users would be in the same turn at the same time.
    """
    turn = draw.randrange(TURNS)
    history = [*system, *tokens(draw, 42 * turn)]
    while True:
        for _ in range(turn, TURNS):
            history += tokens(draw, draw.randint(10, 26))
            history += yield Asked(history.copy(), draw.randint(12, 36))
        turn, history = 0, [*system]


# Figures


def _median(values: Iterable[float]) -> float:
    return float(f"{statistics.median(values):.4g}")


def _first_token_ms(measured: Measured) -> float:
    return 1e3 * (percentile(measured.first_token_s, 0.5) or 0.0)


def _p95_latency_s(measured: Measured) -> float:
    return percentile(measured.latency_s, 0.95) or 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="GGUF file or safetensors folder (the default model if left out)")
    parser.add_argument("--case", choices=CASES, help="only this one; the others stay as they are in --output")
    parser.add_argument("--seconds", type=float, default=6.0, help="measured in each round (default %(default)s)")
    parser.add_argument("--warmup", type=float, default=3.0, help="seconds before that (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side (default %(default)s)")
    parser.add_argument("--max-model-len", type=int, help="the length of a slab (default: the model's context)")
    parser.add_argument("--num-threads", type=int, help="that compute")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="draw each case there; needs matplotlib")
    args = parser.parse_args()
    model = args.model or str(pull_model("default", report=print))
    gains: dict[str, list[Gain]] = {}
    for case in CASES if args.case is None else [args.case]:
        config = EngineConfig(
            model=model,
            num_threads=args.num_threads,
            block_size=BLOCK_SIZES[case],
            max_num_seqs=MAX_SEATS,
            max_model_len=args.max_model_len,
            num_blocks=POOL_TOKENS // BLOCK_SIZES[case] + MAX_SEATS,
            num_speculative_tokens=0,
        )
        bench = Bench(config, seconds=args.seconds, warmup_s=args.warmup, num_rounds=args.rounds)
        gains[case] = CASES[case](bench)
    figures: dict[str, object] = {case: [asdict(gain) | gain.derived() for gain in of] for case, of in gains.items()}
    if args.output is not None and args.output.exists():
        written = json.loads(args.output.read_text())
        figures = {case: written[case] for case in CASES if case in written} | figures
    settings = {name: getattr(args, name) for name in ("seconds", "warmup", "rounds")}
    rows = [{"case": case, **gain.row()} for case, of in gains.items() for gain in of]
    print_report("cases", rows, settings | figures, output=args.output)
    if args.pictures is not None:
        draw_pictures(gains, args.pictures)


if __name__ == "__main__":
    main()
