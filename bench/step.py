"""Where a decode step's time goes: schedule, prepare, forward, sample and commit, at several batch sizes.

    python -P -m pagedd.bench.step --batches 1,8,32

The real engine in this process, without the daemon around it. Every sequence has a random prompt and decodes; a step is
measured only when all of them are in it, and no prompt is. Figures are medians over steps, in milliseconds.

    context    tokens of a sequence with KV, in the middle of the measured steps, median over sequences
    overhead   schedule + prepare + sample + commit: what is not the model
    total      the whole call, the engine's own bookkeeping between the parts included
"""

import argparse
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pagedd.bench.report import Cell, print_report
from pagedd.daemon.models import pull_model
from pagedd.engine.config import EngineConfig
from pagedd.engine.create import create_engine
from pagedd.engine.engine import Engine
from pagedd.engine.request import Request
from pagedd.engine.sampling_params import SamplingParams

PARTS = ("schedule", "prepare", "forward", "sample", "commit")
OVERHEAD = ("schedule", "prepare", "sample", "commit")
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Medians over the measured steps, in seconds."""

    batch_size: int
    context_len: int
    parts_s: Mapping[str, float]
    total_s: float

    @property
    def overhead_s(self) -> float:
        return sum(self.parts_s[part] for part in OVERHEAD)


def measure(
    engine: Engine,
    batch_size: int,
    *,
    vocab_size: int,
    context_len: int,
    num_steps: int,
    num_warmup_steps: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 7,
) -> StepTimes:
    """Decodes `batch_size` sequences of about `context_len` tokens together. The engine is idle before and after.

    Raises:
        RuntimeError: the sequences do not come to decode together: the pool or the seats are too few.
    """
    draw, limits = random.Random(seed), engine.stats()
    num_prompt_tokens = max(1, context_len - num_warmup_steps - num_steps // 2)
    # As many as may be asked for: the first sequences decode while the last ones prefill, and none may end.
    max_tokens = min(limits.max_model_len, limits.num_blocks * limits.block_size) - num_prompt_tokens
    for number in range(batch_size):
        engine.add(
            Request(
                request_id=str(number),
                prompt_token_ids=[draw.randrange(10, vocab_size) for _ in range(num_prompt_tokens)],
                params=SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=number),
            )
        )
    try:
        _decode_together(engine, batch_size)
        for _ in range(num_warmup_steps):
            engine.step()
        parts: dict[str, list[float]] = {part: [] for part in PARTS}
        totals: list[float] = []
        context_lens: list[int] = []
        for number in range(num_steps):
            before = engine.stats().step_seconds
            started = time.perf_counter()
            outputs = engine.step()
            totals.append(time.perf_counter() - started)
            if len(outputs) != batch_size:
                raise RuntimeError(f"{len(outputs)} of {batch_size} sequences were in a step; raise num_blocks")
            after = engine.stats().step_seconds
            for part in PARTS:
                parts[part].append(after[part] - before[part])
            if number == num_steps // 2:
                context_lens = [sequence.num_computed_tokens for sequence in engine.snapshot().sequences]
    finally:
        for number in range(batch_size):
            engine.abort(str(number))
    return StepTimes(
        batch_size=batch_size,
        context_len=round(statistics.median(context_lens)),
        parts_s={part: statistics.median(values) for part, values in parts.items()},
        total_s=statistics.median(totals),
    )


def _decode_together(engine: Engine, batch_size: int) -> None:
    """Steps until one in which every sequence draws a token and computes only one."""
    while True:
        outputs = engine.step()
        if len(outputs) == batch_size == engine.stats().num_scheduled_tokens:
            return
        if any(output.finish_reason for output in outputs):
            break
    raise RuntimeError(
        f"{batch_size} sequences do not decode together before one ends; raise num_blocks or max_num_seqs"
    )


def table_row(times: StepTimes) -> dict[str, Cell]:
    return {
        "batch": times.batch_size,
        "context": times.context_len,
        **{f"{part} ms": 1e3 * times.parts_s[part] for part in PARTS},
        "overhead ms": 1e3 * times.overhead_s,
        "total ms": 1e3 * times.total_s,
        "tokens/s": times.batch_size / times.total_s,
    }


def _batch_sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default", help="name or path (default: the default model)")
    parser.add_argument("--dtype", default="auto", help="of the engine (default %(default)s)")
    parser.add_argument("--weight-dtype", default="auto", help="of the engine (default %(default)s)")
    parser.add_argument("--kv-cache-dtype", default="auto", help="of the engine (default %(default)s)")
    parser.add_argument("--batches", type=_batch_sizes, default=[1, 8, 32], help="sizes (default 1,8,32)")
    parser.add_argument("--context", type=int, default=200, help="tokens of a sequence (default %(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="measured at each size (default %(default)s)")
    parser.add_argument("--warmup", type=int, default=10, help="decode steps before that (default %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default %(default)s)")
    parser.add_argument("--top-p", type=float, default=1.0, help="of drawn tokens (default %(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the line of JSON there")
    args = parser.parse_args()

    rows, figures = run(args, args.batches)
    print_report("step", rows, figures, output=args.output)


def run(args: argparse.Namespace, batches: Sequence[int]) -> tuple[list[dict[str, Cell]], dict[str, object]]:
    """One row for each batch size, and the figures of all."""
    weights, largest = pull_model(args.model, report=print), max(batches)
    # Room for every sequence at twice the context: those that prefill first run ahead of the last.
    max_model_len = 2 * (args.context + args.steps + args.warmup)
    engine, info = create_engine(
        EngineConfig(
            model=str(weights),
            dtype=args.dtype,
            weight_dtype=args.weight_dtype,
            kv_cache_dtype=args.kv_cache_dtype,
            block_size=BLOCK_SIZE,
            num_blocks=largest * -(-max_model_len // BLOCK_SIZE),
            max_num_seqs=largest,
            num_speculative_tokens=0,  # a step is a token of every sequence
            enable_prefix_caching=False,
        ),
        lambda share, what: None,
    )
    measured = [
        measure(
            engine,
            batch_size,
            vocab_size=info.vocab_size,
            context_len=args.context,
            num_steps=args.steps,
            num_warmup_steps=args.warmup,
            temperature=args.temperature,
            top_p=args.top_p,
        )
        for batch_size in batches
    ]
    figures = {
        "model": weights.name,
        "device": info.device,
        "dtype": info.dtype,
        "weight_dtype": args.weight_dtype,
        "kv_cache_dtype": info.kv_cache_dtype,
        "model_bytes": info.model_bytes,
        "steps": args.steps,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "by_batch_size": {
            times.batch_size: {
                "context_len": times.context_len,
                **{f"{part}_ms": round(1e3 * times.parts_s[part], 4) for part in PARTS},
                "overhead_ms": round(1e3 * times.overhead_s, 4),
                "total_ms": round(1e3 * times.total_s, 4),
            }
            for times in measured
        },
    }
    return [table_row(times) for times in measured], figures


if __name__ == "__main__":
    main()
