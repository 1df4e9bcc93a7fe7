"""What each form of weights and KV costs in accuracy: perplexity and top-1 agreement on real text, against float32.

    python -P -m pagedd.bench.accuracy --weights auto,bf16,int8,int4 --kv bf16 --rows 512,32,1

The text is the help on Python's language that every CPython carries (`pydoc_data.topics`, PSF licence), in the order of
its titles. It changes a little between versions of Python, so its digest and its length in tokens are printed. Nothing
may be calibrated on it. Windows of 512 tokens are taken at even distances; each starts a context of its own.

The reference is transformers' model in float32 on the dequantized weights. What is compared with it is the engine's own
model, as the settings make it, fed with the window in chunks:

    weights      the engine's `weight_dtype`: `auto` with KV as it is served by default, the others with KV in bf16
                 (float32 in float32)
    KV           the engine's `kv_cache_dtype`, each on weights in their `auto` form: what would be served. With `bf16`
                 first among them, `of bf16` compares the others with it: what the cache costs. Beside weights whose
                 products round their inputs to 8 bits a small change of the cache becomes a larger one of the inputs;
                 `--kv-weights float32` leaves that out, so that the cache alone is measured
    rows         tokens in one chunk: 512 is the whole window, 1 is decoding. The chunk chooses the matrix product, and
                 each must be as good. Fewer windows are run for chunks under 32 rows (`--few-windows`)

    perplexity   exp of the mean negative log likelihood of each window's tokens 1 to 511, given those before
    delta        in percent of the reference's perplexity on the same windows
    top-1        share of positions whose most likely token is the reference's

A form that the engine refuses is said and left out.
"""

import argparse
import gc
import hashlib
import math
import pydoc_data.topics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from pagedd.bench.reference_model import load_reference
from pagedd.bench.report import Cell, print_report
from pagedd.daemon.models import pull_model, resolve_model
from pagedd.engine.config import EngineConfig
from pagedd.engine.create import create_runner
from pagedd.engine.errors import EngineError
from pagedd.engine.kv_quality_check import text_logits
from pagedd.engine.runner import ModelRunner

BLOCK_SIZE = 16
WEIGHT_FORMS = ("auto", "float32", "bf16", "int8", "int4")
KV_FORMS = ("bf16", "fp8", "int8", "k8v4", "int4")
FEW_ROWS = 32  # chunks of fewer rows run on `--few-windows`
# The engine's `dtype`.
ACTIVATIONS = {"float32": "float32", "bf16": "bfloat16"}

TARGETS = {"auto": {"delta": 0.01, "top_1": 0.92}, "bf16": {"delta": 0.003, "top_1": 0.96}}

Logits = Callable[[list[int]], torch.Tensor]  # token ids of a window -> [num_tokens, vocab_size] float32


@dataclass(frozen=True, slots=True, eq=False)
class WindowScore:
    """One window under one model.

    Attributes:
        nll: [num_tokens − 1] float64; of token i + 1 given tokens [0, i].
        top_1: [num_tokens − 1]; the most likely token at the same positions.
    """

    nll: torch.Tensor
    top_1: torch.Tensor


@dataclass(frozen=True, slots=True)
class Comparison:
    """`delta` and `top_1` are ratios: 0.01 is one percent."""

    num_tokens: int
    perplexity: float
    delta: float
    top_1: float


@dataclass(frozen=True, slots=True)
class Case:
    """One set of engine settings."""

    weights: str
    kv: str

    def settings(self, weights: Path, window: int) -> EngineConfig:
        return EngineConfig(
            model=str(weights),
            device="cpu",
            dtype=ACTIVATIONS.get(self.weights, "auto"),
            weight_dtype=self.weights,
            kv_cache_dtype=self.kv,
            block_size=BLOCK_SIZE,
            num_blocks=-(-window // BLOCK_SIZE),
            max_num_batched_tokens=window,
        )


def make_cases(weight_forms: Sequence[str], kv_forms: Sequence[str], kv_weights: str = "auto") -> list[Case]:
    """What is served by default, other weights beside a cache that costs nothing, then KV forms on `kv_weights`."""
    own_cache = {"auto": "auto", "float32": "float32"}
    return [Case(form, own_cache.get(form, "bf16")) for form in weight_forms] + [
        Case(kv_weights, form) for form in kv_forms
    ]


def reference_text() -> str:
    """The topics in the order of their titles, an empty line between."""
    topics: dict[str, str] = pydoc_data.topics.topics
    return "\n\n".join(topics[title].strip() for title in sorted(topics))


def take_windows(token_ids: Sequence[int], num_windows: int, window: int) -> list[list[int]]:
    """`num_windows` runs of `window` tokens that do not overlap, the first at the start, the last at the end.

    Raises:
        ValueError: the text is too short.
    """
    if num_windows < 1 or num_windows * window > len(token_ids):
        raise ValueError(f"{num_windows} windows of {window} tokens do not fit a text of {len(token_ids)}")
    last = len(token_ids) - window
    starts = [last * number // max(1, num_windows - 1) for number in range(num_windows)]
    return [list(token_ids[start : start + window]) for start in starts]


def score(logits: torch.Tensor, token_ids: Sequence[int]) -> WindowScore:
    """`logits`: [num_tokens, vocab_size]; row i predicts token i + 1, so the last row predicts nothing here."""
    rows, targets = logits[:-1].float(), torch.tensor(token_ids[1:])
    chosen = rows.gather(1, targets[:, None])[:, 0]
    return WindowScore((rows.logsumexp(dim=1) - chosen).double(), rows.argmax(dim=1))


def compare(measured: Sequence[WindowScore], reference: Sequence[WindowScore]) -> Comparison:
    """The same windows in both, in the same order."""
    num_tokens = sum(len(window.nll) for window in measured)
    agreed = sum(int((ours.top_1 == theirs.top_1).sum()) for ours, theirs in zip(measured, reference, strict=True))
    ours_perplexity = perplexity(measured)
    return Comparison(num_tokens, ours_perplexity, ours_perplexity / perplexity(reference) - 1, agreed / num_tokens)


def perplexity(scores: Sequence[WindowScore]) -> float:
    return math.exp(torch.cat([window.nll for window in scores]).mean().item())


def spread(num_windows: int, count: int) -> list[int]:
    """Indices of `count` of the windows at even distances: a few of them still come from all of the text."""
    count = min(count, num_windows)
    return [number * num_windows // count for number in range(count)]


def reference_logits(weights: Path) -> Logits:
    """transformers in float32."""
    model = load_reference(weights, torch.float32)

    @torch.inference_mode()
    def logits(token_ids: list[int]) -> torch.Tensor:
        result: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
        return result

    return logits


def chunked_logits(runner: ModelRunner, token_ids: list[int], num_rows: int) -> torch.Tensor:
    """[num_tokens, vocab_size] float32: every position's logits, from chunks of `num_rows` tokens."""
    # Of the runner's own model: a step gives only the rows that something is drawn from, and here all are wanted.
    return torch.cat(list(text_logits(runner._model, runner.storage, token_ids, num_rows)))


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table."""

    case: Case
    num_rows: int
    model_bytes: int
    kv_bytes_per_token: int
    comparison: Comparison
    scores: tuple[WindowScore, ...]


def measure(
    case: Case,
    weights: Path,
    windows: Sequence[list[int]],
    reference: Sequence[WindowScore],
    *,
    rows: Sequence[int],
    num_few_windows: int,
) -> Iterator[Result]:
    """One result for each count of rows. Raises `EngineError` when the engine refuses the settings."""
    runner, info = create_runner(case.settings(weights, len(windows[0])), lambda share, what: None)
    for num_rows in rows:
        chosen = spread(len(windows), num_few_windows if num_rows < FEW_ROWS else len(windows))
        scores = [score(chunked_logits(runner, windows[index], num_rows), windows[index]) for index in chosen]
        comparison = compare(scores, [reference[index] for index in chosen])
        yield Result(case, num_rows, info.model_bytes, info.kv_bytes_per_token, comparison, tuple(scores))


def beside_16_bits(result: Result, results: Sequence[Result]) -> Comparison | None:
    """What the form of the cache alone costs; `None` where the same weights were not run over a cache in bf16."""
    for other in results:
        if other.case == Case(result.case.weights, "bf16") and other.num_rows == result.num_rows:
            return compare(result.scores, other.scores)
    return None


def table_row(result: Result, results: Sequence[Result]) -> dict[str, Cell]:
    beside = beside_16_bits(result, results)
    return {
        "weights": result.case.weights,
        "KV": result.case.kv,
        "rows": result.num_rows,
        "tokens": result.comparison.num_tokens,
        "perplexity": f"{result.comparison.perplexity:.4f}",
        "delta %": f"{100 * result.comparison.delta:+.3f}",
        "top-1 %": f"{100 * result.comparison.top_1:.2f}",
        "of bf16 delta %": "" if beside is None else f"{100 * beside.delta:+.3f}",
        "of bf16 top-1 %": "" if beside is None else f"{100 * beside.top_1:.2f}",
        "weights MB": result.model_bytes / 1e6,
        "KV bytes a token": result.kv_bytes_per_token,
    }


def _rounded(comparison: Comparison | None) -> dict[str, float] | None:
    if comparison is None:
        return None
    return {"delta": round(comparison.delta, 6), "top_1": round(comparison.top_1, 5)}


def _names(text: str) -> list[str]:
    return text.split(",") if text else []


def _counts(text: str) -> list[int]:
    return [int(count) for count in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default", help="GGUF file, folder or name (default: the default model)")
    parser.add_argument("--weights", type=_names, default=list(WEIGHT_FORMS), help="forms, separated by commas")
    parser.add_argument("--kv", type=_names, default=list(KV_FORMS), help="forms, separated by commas; '' for none")
    parser.add_argument(
        "--kv-weights", choices=WEIGHT_FORMS, default="auto", help="form of the weights beside --kv (default auto)"
    )
    parser.add_argument("--rows", type=_counts, default=[512, 32, 1], help="tokens in a chunk (default 512,32,1)")
    parser.add_argument("--window", type=int, default=512, help="tokens (default %(default)s)")
    parser.add_argument("--windows", type=int, default=48, help="how many (default %(default)s: 24576 tokens)")
    parser.add_argument("--few-windows", type=int, default=4, help="for chunks under 32 rows (default %(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the line of JSON there")
    args = parser.parse_args()

    weights, prepared = pull_model(args.model, report=print), resolve_model(args.model, report=print)
    text = reference_text()
    tokenizer = Tokenizer.from_file(str(prepared / "tokenizer.json"))
    token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    try:
        windows = take_windows(token_ids, args.windows, args.window)
    except ValueError as error:
        parser.error(str(error))
    digest = hashlib.sha256(text.encode()).hexdigest()
    print(f"text: {len(text)} characters, sha256 {digest}, {len(token_ids)} tokens")
    print(f"read: {args.windows} windows of {args.window}, {args.windows * args.window} tokens", flush=True)

    reference = _score_all(reference_logits(weights), windows)
    gc.collect()  # the reference model, before the next is loaded
    reference_perplexity = perplexity(reference)
    print(f"reference: float32, perplexity {reference_perplexity:.4f}", flush=True)

    results: list[Result] = []
    skipped: dict[str, str] = {}
    for case in make_cases(args.weights, args.kv, args.kv_weights):
        name = f"weights {case.weights}, KV {case.kv}"
        try:
            for result in measure(case, weights, windows, reference, rows=args.rows, num_few_windows=args.few_windows):
                results.append(result)
                print(f"{name}, rows {result.num_rows}: {100 * result.comparison.delta:+.3f} %", flush=True)
        except EngineError as error:
            skipped[name] = str(error)
            print(f"{name} is skipped: {error}", flush=True)
        gc.collect()

    figures = {
        "model": weights.name,
        "text_sha256": digest,
        "text_tokens": len(token_ids),
        "windows": args.windows,
        "window": args.window,
        "reference_perplexity": round(reference_perplexity, 5),
        "results": [
            {
                "weights": result.case.weights,
                "kv_cache": result.case.kv,
                "rows": result.num_rows,
                "num_tokens": result.comparison.num_tokens,
                "perplexity": round(result.comparison.perplexity, 5),
                "delta": round(result.comparison.delta, 6),
                "top_1": round(result.comparison.top_1, 5),
                "beside_bf16": _rounded(beside_16_bits(result, results)),
                "model_bytes": result.model_bytes,
                "kv_bytes_per_token": result.kv_bytes_per_token,
            }
            for result in results
        ],
        "targets": TARGETS,
        "skipped": skipped,
    }
    print_report("accuracy", [table_row(result, results) for result in results], figures, output=args.output)


def _score_all(logits: Logits, windows: Sequence[list[int]]) -> list[WindowScore]:
    return [score(logits(token_ids), token_ids) for token_ids in windows]


if __name__ == "__main__":
    main()
