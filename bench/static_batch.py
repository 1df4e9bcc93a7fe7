"""Continuous batching against static batches: the `throughput` load on pagedd and on transformers, same weights.

    python -P -m pagedd.bench.static_batch --model PATH.gguf --rounds 3

pagedd is a real daemon, asked over its HTTP socket. transformers takes the same requests in order of arrival, `--seats`
at a time, pads each batch on the left to its longest prompt and generates until its longest output is done. Both count
only the tokens that were asked for. The two take turns, each round with prompts of its own (so that no round finds the
last one's in the prefix cache), and the medians are compared.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from pagedd.bench.daemon_process import running_daemon
from pagedd.bench.load import LoadClient, LoadRequest, make_load
from pagedd.bench.reference_model import load_reference
from pagedd.bench.report import Cell, print_report
from pagedd.daemon.models import pull_model

TARGET_RATIO = 2.0


class StaticBatcher:
    """transformers' `generate` on fixed batches."""

    def __init__(self, weights: Path, dtype: torch.dtype, device: str, batch_size: int) -> None:
        model = load_reference(weights, dtype).to(device)
        self._model = model
        self.vocab_size: int = model.config.vocab_size
        self._device = device
        self._batch_size = batch_size

    def output_tokens_per_s(self, load: Sequence[LoadRequest]) -> float:
        """Tokens asked for, over the time in which all batches are done."""
        started = time.perf_counter()
        for first in range(0, len(load), self._batch_size):
            self._generate(load[first : first + self._batch_size])
        return sum(request.num_output_tokens for request in load) / (time.perf_counter() - started)

    @torch.inference_mode()
    def _generate(self, batch: Sequence[LoadRequest]) -> None:
        width = max(len(request.prompt_token_ids) for request in batch)
        padding = [width - len(request.prompt_token_ids) for request in batch]
        ids = [[0] * pad + request.prompt_token_ids for pad, request in zip(padding, batch, strict=True)]
        mask = [[0] * pad + [1] * (width - pad) for pad in padding]
        longest = max(request.num_output_tokens for request in batch)
        output = self._model.generate(
            input_ids=torch.tensor(ids, device=self._device),
            attention_mask=torch.tensor(mask, device=self._device),
            do_sample=False,
            min_new_tokens=longest,
            max_new_tokens=longest,
            pad_token_id=0,
        )
        if output.shape[1] != width + longest:
            raise RuntimeError(f"asked transformers for {longest} tokens, got {output.shape[1] - width}")


async def compare(args: argparse.Namespace) -> tuple[list[dict[str, Cell]], dict[str, object]]:
    """One row for each round, and the figures of all."""
    weights = Path(args.model) if args.model else pull_model("default", report=print)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    static = StaticBatcher(weights, getattr(torch, args.dtype), device, args.seats)
    flags = ["--model", str(weights.absolute()), "--dtype", args.dtype, "--max-num-seqs", str(args.seats)]
    rows: list[dict[str, Cell]] = []
    async with running_daemon(flags) as daemon:
        client = LoadClient("http://localhost", unix_socket=str(daemon.http_socket))
        for round_number in range(args.rounds):
            load = make_load("throughput", args.n, vocab_size=static.vocab_size, seed=args.seed + round_number)
            paged = await client.run(load, concurrency=args.seats)
            if paged.num_output_tokens != paged.num_output_tokens_asked:
                raise RuntimeError(f"pagedd gave {paged.num_output_tokens} of {paged.num_output_tokens_asked} tokens")
            static_rate = static.output_tokens_per_s(load)
            rows.append(
                {
                    "round": round_number + 1,
                    "output tokens": paged.num_output_tokens,
                    "pagedd tokens/s": paged.output_tokens_per_s,
                    "static tokens/s": static_rate,
                    "ratio": paged.output_tokens_per_s / static_rate,
                }
            )
    paged_median = statistics.median(float(row["pagedd tokens/s"] or 0) for row in rows)
    static_median = statistics.median(float(row["static tokens/s"] or 0) for row in rows)
    figures = {
        "model": weights.name,
        "device": device,
        "dtype": args.dtype,
        "num_requests": args.n,
        "seats": args.seats,
        "rounds": args.rounds,
        "daemon_health_s": round(daemon.health_s, 2),
        "daemon_ready_s": round(daemon.ready_s, 2),
        "pagedd_output_tokens_per_s": round(paged_median, 1),
        "static_output_tokens_per_s": round(static_median, 1),
        "ratio": round(paged_median / static_median, 2),
        "target_ratio": TARGET_RATIO,
    }
    return rows, figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="GGUF file or safetensors folder (the default model if left out)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32", "float16"))
    parser.add_argument("--rounds", type=int, default=3, help="turns of each (default %(default)s)")
    parser.add_argument("--seats", type=int, default=32, help="running at once, both sides (default %(default)s)")
    parser.add_argument("-n", type=int, default=64, help="requests a round (default %(default)s)")
    parser.add_argument("--seed", type=int, default=7, help="of the first round's prompts (default %(default)s)")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    rows, figures = asyncio.run(compare(args))
    print_report("static_batch", rows, figures)


if __name__ == "__main__":
    main()
