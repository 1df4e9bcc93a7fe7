"""What paging is worth: fragmentation, and concurrent sequences against contiguous slabs in the same KV memory.

    python -P -m pagedd.bench.paging

With `--kv`, what quantizing the cache is worth: concurrent sequences with each form of it in the same bytes.

The real engine, scheduler and block pool run on a backlog of mixed lengths (mean 200 tokens, at most 2048). Only the
model is missing: every draw is the same token, since blocks do not depend on what the tokens are. The comparison is
the same memory cut into contiguous slabs of 2048 tokens, one for each sequence.

Figures are averages over the steps after a warm-up of `--warmup` steps, by when the pool is full:

    fragmentation   slots of used blocks that hold no token / slots of used blocks
    concurrent      sequences that hold a seat
    slabs           sequences that the contiguous layout holds: pool tokens / 2048, whatever their lengths
    slab waste      slots of those slabs that would hold no token
    recomputed      tokens computed again after a preemption / tokens computed
    open keys       what two pages a sequence take beside the pool, of its bytes: keys of int4 that wait in 16 bits.
                    Much, as sequences here are short; it falls with their length
"""

import argparse
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pagedd.bench.report import Cell, print_report
from pagedd.engine.config import SchedulerConfig
from pagedd.engine.engine import Engine
from pagedd.engine.kv.block_manager import BlockManager
from pagedd.engine.request import Request
from pagedd.engine.sampling_params import SamplingParams
from pagedd.engine.scheduler import Scheduler
from pagedd.engine.step import Runner, Sampled, Step
from pagedd.kernels.kv_form import FORMS

MAX_MODEL_LEN = 2048
MEAN_PROMPT_TOKENS = 130
MEAN_OUTPUT_TOKENS = 70
BLOCK_SIZES = (8, 16, 32)

TARGET_FRAGMENTATION = 0.05
TARGET_CONCURRENCY_RATIO = 4.0


class OneTokenRunner(Runner):
    """Computes nothing and draws token 0 for everyone."""

    def run(self, step: Step) -> list[Sampled]:
        return [Sampled(0) for item in step.scheduled for _ in item.samplers]


# Of one head; what layers and heads multiply by is the same for every form.
HEAD_DIM = 64
KV_FORMS = ("bf16", "int8", "fp8", "k8v4", "int4")
_PAGES_A_SEQUENCE = 2


@dataclass(frozen=True, slots=True)
class PagingResult:
    """Averages over the measured steps; defined in this module's docstring."""

    block_size: int
    fragmentation: float
    num_concurrent: float
    num_slabs: int
    slab_waste: float
    recomputed_ratio: float
    mean_length: float

    @property
    def concurrency_ratio(self) -> float:
        return self.num_concurrent / self.num_slabs


def measure(
    block_size: int, *, num_pool_tokens: int, num_steps: int, num_warmup_steps: int, seed: int = 7
) -> PagingResult:
    """Runs the engine on a backlog that never ends, in a pool of `num_pool_tokens` slots."""
    num_blocks = num_pool_tokens // block_size
    config = SchedulerConfig(
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_seqs=num_blocks,  # so that memory, not seats, is the limit
        max_num_batched_tokens=num_blocks + 2048,  # every sequence decodes, and the pool fills quickly
        max_model_len=MAX_MODEL_LEN,
    )
    engine = Engine(OneTokenRunner(), Scheduler(config, BlockManager(num_blocks, block_size)))
    backlog = mixed_requests(seed)
    lengths: list[int] = []
    num_live = num_slots = num_running = num_computed = 0
    recomputed_before = 0
    for step_number in range(num_warmup_steps + num_steps):
        while engine.stats().num_requests_waiting < 16:
            request = next(backlog)
            lengths.append(len(request.prompt_token_ids) + request.params.max_tokens)
            engine.add(request)
        engine.step()
        stats = engine.stats()
        if step_number < num_warmup_steps:
            recomputed_before = stats.recomputed_tokens_total
            continue
        num_live += stats.num_live_tokens
        num_slots += stats.num_blocks_used * block_size
        num_running += stats.num_requests_running
        num_computed += stats.num_scheduled_tokens
    num_slabs = num_pool_tokens // MAX_MODEL_LEN
    return PagingResult(
        block_size=block_size,
        fragmentation=1 - num_live / num_slots,
        num_concurrent=num_running / num_steps,
        num_slabs=num_slabs,
        slab_waste=1 - num_live / num_running / MAX_MODEL_LEN,
        recomputed_ratio=(engine.stats().recomputed_tokens_total - recomputed_before) / num_computed,
        mean_length=sum(lengths) / len(lengths),
    )


@dataclass(frozen=True, slots=True)
class FormResult:
    """One form of the cache in as many bytes as every other. `growth`: concurrent sequences over those with bf16.

    Attributes:
        open_keys_ratio: of the pool's bytes, what open keys take beside it.
    """

    form: str
    bytes_ratio: float
    num_pool_tokens: int
    num_concurrent: float
    growth: float
    open_keys_ratio: float

    @property
    def whole_growth(self) -> float:
        """Where the bytes of open keys are taken from the pool's."""
        return self.growth / (1 + self.open_keys_ratio)


def measure_forms(block_size: int, *, num_bf16_tokens: int, num_steps: int, num_warmup_steps: int) -> list[FormResult]:
    """Each of `KV_FORMS` in the bytes that `num_bf16_tokens` take in bf16."""
    sizes = {name: FORMS[name].block_bytes(block_size, HEAD_DIM) for name in KV_FORMS}
    num_bytes = num_bf16_tokens // block_size * sizes["bf16"]
    results: list[FormResult] = []
    for name, block_bytes in sizes.items():
        num_tokens = num_bytes // block_bytes * block_size
        paging = measure(block_size, num_pool_tokens=num_tokens, num_steps=num_steps, num_warmup_steps=num_warmup_steps)
        page_bytes = _PAGES_A_SEQUENCE * FORMS[name].page_bytes(block_size, HEAD_DIM)
        results.append(
            FormResult(
                form=name,
                bytes_ratio=block_bytes / sizes["bf16"],
                num_pool_tokens=num_tokens,
                num_concurrent=paging.num_concurrent,
                growth=paging.num_concurrent / results[0].num_concurrent if results else 1.0,
                open_keys_ratio=paging.num_concurrent * page_bytes / num_bytes,
            )
        )
    return results


def mixed_requests(seed: int) -> Iterator[Request]:
    """Prompts and outputs of exponentially distributed length; prompt + output is at most `MAX_MODEL_LEN`."""
    draw = random.Random(seed)
    for number in itertools.count():
        num_prompt = min(1 + int(draw.expovariate(1 / MEAN_PROMPT_TOKENS)), MAX_MODEL_LEN - 1)
        num_output = min(1 + int(draw.expovariate(1 / MEAN_OUTPUT_TOKENS)), MAX_MODEL_LEN - num_prompt)
        # Prompts of the request's own number share no prefix, so that nothing here is owed to the prefix cache.
        yield Request(
            request_id=str(number),
            prompt_token_ids=[number] * num_prompt,
            params=SamplingParams(max_tokens=num_output),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pool-tokens", type=int, default=32768, help="KV slots in the pool (default %(default)s)")
    parser.add_argument("--steps", type=int, default=2000, help="measured (default %(default)s)")
    parser.add_argument("--warmup", type=int, default=500, help="steps before that (default %(default)s)")
    parser.add_argument("--seed", type=int, default=7, help="of the lengths (default %(default)s)")
    parser.add_argument("--kv", action="store_true", help="forms of the cache in the same bytes instead")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the line of JSON there")
    args = parser.parse_args()
    if args.kv:
        report_forms(args)
        return

    results = [
        measure(
            block_size,
            num_pool_tokens=args.pool_tokens,
            num_steps=args.steps,
            num_warmup_steps=args.warmup,
            seed=args.seed,
        )
        for block_size in BLOCK_SIZES
    ]
    rows: list[dict[str, Cell]] = [
        {
            "block size": r.block_size,
            "fragmentation %": 100 * r.fragmentation,
            "concurrent": r.num_concurrent,
            "slabs": r.num_slabs,
            "ratio": r.concurrency_ratio,
            "slab waste %": 100 * r.slab_waste,
            "recomputed %": 100 * r.recomputed_ratio,
            "mean length": r.mean_length,
        }
        for r in results
    ]
    figures = {
        "pool_tokens": args.pool_tokens,
        "max_model_len": MAX_MODEL_LEN,
        "steps": args.steps,
        "by_block_size": {
            r.block_size: {
                "fragmentation": round(r.fragmentation, 4),
                "num_concurrent": round(r.num_concurrent, 1),
                "concurrency_ratio": round(r.concurrency_ratio, 2),
                "slab_waste": round(r.slab_waste, 4),
                "recomputed_ratio": round(r.recomputed_ratio, 4),
            }
            for r in results
        },
        "target_fragmentation": TARGET_FRAGMENTATION,
        "target_concurrency_ratio": TARGET_CONCURRENCY_RATIO,
    }
    print_report("paging", rows, figures, output=args.output)


def report_forms(args: argparse.Namespace) -> None:
    by_block_size = {
        block_size: measure_forms(
            block_size, num_bf16_tokens=args.pool_tokens, num_steps=args.steps, num_warmup_steps=args.warmup
        )
        for block_size in (16, 32)
    }
    rows: list[dict[str, Cell]] = [
        {
            "block size": block_size,
            "KV": result.form,
            "bytes %": 100 * result.bytes_ratio,
            "pool tokens": result.num_pool_tokens,
            "concurrent": result.num_concurrent,
            "growth": result.growth,
            "open keys %": 100 * result.open_keys_ratio,
            "growth with them": result.whole_growth,
        }
        for block_size, results in by_block_size.items()
        for result in results
    ]
    figures = {
        "bf16_pool_tokens": args.pool_tokens,
        "head_dim": HEAD_DIM,
        "steps": args.steps,
        "by_block_size": {
            block_size: {
                result.form: {
                    "bytes_ratio": round(result.bytes_ratio, 4),
                    "num_concurrent": round(result.num_concurrent, 1),
                    "growth": round(result.growth, 3),
                    "open_keys_ratio": round(result.open_keys_ratio, 4),
                    "whole_growth": round(result.whole_growth, 3),
                }
                for result in results
            }
            for block_size, results in by_block_size.items()
        },
    }
    print_report("kv-concurrency", rows, figures, output=args.output)


if __name__ == "__main__":
    main()
