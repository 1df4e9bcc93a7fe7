"""Everything about a card that a machine without one cannot know, in one go. From a checkout, nothing installed:

    python -P bench/gpu_check.py                        all parts
    python -P bench/gpu_check.py correct attention      some of them
    python -P bench/gpu_check.py --output FILE          and the line of JSON into a file

It needs torch, triton, safetensors and numpy, and a C compiler for Triton; for `model`, `compiled` and `graphs` also
transformers. Parts, each a few lines of the table; most of the time is compiling:

    ceilings     what this card copies and multiplies at best: the measure for everything below; what timing adds
    attention    decode GB/s beside the copy, prefill TFLOP/s beside the product, for every form of the cache
    model        a random Llama of 8B's shape through the engine: decode at batch 1, 8, 64, 256, prefill; beside
                 transformers with SDPA and its static cache on the same weights, kernel by kernel
    compiled     transformers' decode through torch.compile; run after `model` it is compared
    linear       products with 4 and 8 bit weights: GB/s at few rows, TFLOP/s at many
    graphs       replayed decode steps equal eager ones, and what a replay saves
    correct      each kernel against the float64 reference on fresh random inputs; outputs are poisoned first, and the
                 bytes of the cache are compared

Where a machine is lent for a short time, run them by name: what needs the ceilings measures them itself, and parts run
in the order above, those with targets first. What a part found is on stderr as soon as it ends, with the seconds that
it took, and in FILE after every row, there with "complete": false until the end, so a run that is cut short has not
been for nothing; stdout has the whole table at the end, or at SIGTERM, and the line of JSON.

Before, the kernels of `attention`, `linear` and `correct` are compiled by a process a core, which for `correct` is all.

A fault is a row with the unit "failed" that says why; what was found before is kept, and what can go on does: after a
kernel that has made the card unusable to its process, such as one that reads where nothing is, the parts that are left
run in another. Kernels are timed as graphs that are queued far ahead, so that Python's time is not theirs. An 8B
model's weights take 16 GB, and there is one copy of them.

Targets: decode attention over bf16 reaches 80 % of the copy, prefill attention 55 % of the product, the engine's decode
at batch 1 80 % of what the copy allows for the weights' bytes, twice the rate of transformers launched eagerly, and
that of transformers compiled.

Exit status: 0 all parts ran and all targets that were measured are reached; 1 a part failed; 2 wrong arguments, no card
or something that is not installed; 3 all ran, and a target was missed.

`--tiny` runs small sizes on whatever there is, a CPU included, where Triton's kernels are interpreted: that proves the
script, not a card.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LEAST_TRITON = (3, 6)
NEEDED = ("torch", "triton", "safetensors", "numpy")


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured: of an 8B model, or tiny."""

    batch: int
    context: int
    chunk: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    inner: int
    layers: int
    vocab: int
    copy_bytes: int
    matmul: int
    seconds: float  # that one figure is measured for
    rows: tuple[int, ...]  # of products: the last are many
    batches: tuple[int, ...]  # of the model's decode
    prompt: int
    steps: int
    is_tiny: bool = False

    @property
    def most_tokens(self) -> int:
        """Of a sequence that decodes while others are still being computed, and then is measured."""
        return self.prompt + 2 * self.steps + 16


FULL = Sizes(
    batch=64,
    context=4096,
    chunk=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    hidden=4096,
    inner=14336,
    layers=32,
    vocab=128256,
    copy_bytes=1 << 30,
    matmul=8192,
    seconds=0.3,
    rows=(1, 8, 64, 2048),
    batches=(1, 8, 64, 256),
    prompt=128,
    steps=64,
)
TINY = Sizes(
    batch=2,
    context=40,
    chunk=24,
    heads=4,
    kv_heads=2,
    head_dim=64,
    hidden=256,
    inner=96,
    layers=1,
    vocab=96,
    copy_bytes=1 << 16,
    matmul=64,
    seconds=0.0,
    rows=(1, 17),
    batches=(1, 2),
    prompt=8,
    steps=3,
    is_tiny=True,
)

Keep = Callable[[dict[str, Any]], None]  # of a row

BYTES_OF_A_JOB = 3 << 30  # torch's context, and a layer's cache of a full batch at the long context
COMPILED_AHEAD = ("attention", "linear")  # whose kernels several processes compile before anything is timed
SHARED_OUT = ("correct",)  # whose cases those processes compute as well, each its own

# Shares of the card's own ceilings, as measured in `ceilings`; and how many times as quick as transformers.
TARGETS = {
    "decode.bf16": 0.80,
    "prefill.bf16": 0.55,
    "pagedd, decode, batch 1": 0.80,
    "times transformers (eager), batch 1": 2.0,
    "times transformers (compiled), batch 1": 1.0,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="some of the parts (default: all)")
    parser.add_argument("--tiny", action="store_true", help="small sizes, on any machine")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of all inputs (default: the time)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the line of JSON there, after each row")
    parser.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="processes that compile kernels ahead and compare them (default: a core each; with --tiny 1)",
    )
    parser.add_argument("--share", type=int, nargs=2, metavar=("I", "N"), default=(0, 1), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if absent := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        print(
            f"not installed: {', '.join(absent)}; with this Python: pip install {' '.join(NEEDED)} transformers",
            file=sys.stderr,
        )
        return 2

    import torch

    if args.tiny and not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # which Triton looks at when it is imported
    if obstacle := _obstacle(is_tiny=args.tiny):
        print(obstacle, file=sys.stderr)
        return 2
    if "pagedd" not in sys.modules:
        sys.path[:] = [folder for folder in sys.path if Path(folder or ".").resolve() != ROOT / "bench"]
        sys.path.insert(0, str(ROOT / "bench"))
        from checkout import use_checkout  # type: ignore[import-not-found]

        sys.path.pop(0)
        use_checkout(ROOT)
    from pagedd.bench import gpu_parts
    from pagedd.bench.gpu_rows import attempt
    from pagedd.bench.report import environment, print_report, table, write_report

    if not torch.cuda.is_available() and not args.tiny:
        print("no card that torch can use; --tiny runs the script on a CPU", file=sys.stderr)
        return 2
    parts = gpu_parts.PARTS
    if unknown := set(args.parts) - set(parts):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    os.environ["PAGEDD_KERNELS"] = "triton"  # on a CPU too, where another backend would serve
    torch.manual_seed(args.seed)
    index, count = args.share
    check = gpu_parts.Check(
        device, TINY if args.tiny else FULL, args.seed, share=(index, count), only_compiles=count > 1
    )
    rows: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    figures = {"complete": False, "seed": args.seed, "tiny": args.tiny, "card": gpu_parts.facts_of(device)}
    figures |= {"rows": rows, "targets": TARGETS, "failed": failed}
    facts = environment()

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        if row["unit"] == "failed":
            failed.setdefault(row["part"], row["what"])
        if args.output is not None:
            write_report({"benchmark": "gpu_check", **figures, **facts}, args.output)

    before = signal.signal(signal.SIGTERM, _end)
    try:
        names = [name for name in parts if name in (args.parts or parts)]
        if count > 1:  # what counts first, so that no kernel which is only to be compiled can take the card from it
            names.sort(key=lambda name: name not in SHARED_OUT)
        num_jobs = 1 if count > 1 else args.jobs or (1 if args.tiny else _num_jobs(torch.cuda.mem_get_info(device)[0]))
        ahead = [name for name in names if name in (*COMPILED_AHEAD, *SHARED_OUT)]
        if num_jobs > 1 and ahead:
            _run_ahead(ahead, num_jobs, args, failed, keep)
            names = [name for name in names if name not in SHARED_OUT]
        is_complete = True
        for number, name in enumerate(names, start=1):
            started, num_before = time.perf_counter(), len(rows)
            for row in attempt(name, partial(parts[name], check)):
                keep({"part": name, **row})
            found = table(rows[num_before:])
            print(f"{name}: {time.perf_counter() - started:.1f} s\n{found}\n", file=sys.stderr, flush=True)
            if not check.can_go_on() and count == 1:
                is_complete = _run_elsewhere(names[number:], args, keep)
                break
        figures["complete"] = is_complete
    finally:
        print_report("gpu_check", rows, figures, output=args.output)
        signal.signal(signal.SIGTERM, before)
    missed = [] if args.tiny else missed_targets(rows)
    for what in missed:
        print(f"target missed: {what}", file=sys.stderr)
    return 1 if failed else 3 if missed else 0


def _num_jobs(free_bytes: int) -> int:
    """A core each, as far as the card's memory has room for what each puts there."""
    return max(1, min(len(os.sched_getaffinity(0)), free_bytes // BYTES_OF_A_JOB))


def _run_ahead(names: list[str], num_jobs: int, args: argparse.Namespace, failed: dict[str, str], keep: Keep) -> None:
    """The parts' cases, shared out to processes: that compiles them on all cores, and is all that `SHARED_OUT` need.

    A process that a kernel brings down costs the cases of those that it had not computed yet; what was only to be
    compiled is compiled when it is timed. What all of them found counts even when this one is ended meanwhile.
    """
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as files:
        outputs = [Path(folder) / f"{index}.json" for index in range(num_jobs)]
        # To files: a pipe that nobody reads yet would stop who writes to it.
        logs = [output.with_suffix(".log") for output in outputs]
        processes = [
            subprocess.Popen(
                _command(names, args, output, "--share", str(index), str(num_jobs)),
                stdout=subprocess.DEVNULL,
                stderr=files.enter_context(log.open("w")),
            )
            for index, (output, log) in enumerate(zip(outputs, logs, strict=True))
        ]
        try:
            for process in processes:
                process.wait()
        finally:
            for process, output, log in zip(processes, outputs, logs, strict=True):
                process.kill()
                process.wait()
                report = _report_of(output)
                for row in report["rows"]:
                    if row["part"] in SHARED_OUT:
                        keep(row)
                if not report["complete"]:
                    errors = log.read_text()
                    last = next(reversed(errors.strip().splitlines()), "")
                    why = f"a process ended with {process.returncode}: {last}"
                    print(errors, why, sep="\n", file=sys.stderr)
                    failed.update((name, why) for name in names if name in SHARED_OUT)
    print(f"compiled ahead: {', '.join(names)}: {time.perf_counter() - started:.1f} s\n", file=sys.stderr, flush=True)


def _run_elsewhere(names: list[str], args: argparse.Namespace, keep: Keep) -> bool:
    """The parts in a process of their own, one after another; whether that came to its end."""
    if not names:
        return True
    print(f"in another process: {', '.join(names)}\n", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "rest.json"
        process = subprocess.Popen(_command(names, args, output, "--jobs", "1"), stdout=subprocess.DEVNULL)
        try:
            process.wait()
        finally:
            process.kill()
            process.wait()
            report = _report_of(output)
            for row in report["rows"]:
                keep(row)
    return bool(report["complete"])


def _command(names: list[str], args: argparse.Namespace, output: Path, *more: str) -> list[str]:
    script = [sys.executable, "-P", str(ROOT / "bench" / "gpu_check.py"), *names, "--seed", str(args.seed)]
    return [*script, *(["--tiny"] if args.tiny else []), *more, "--output", str(output)]


def _report_of(output: Path) -> dict[str, Any]:
    """What a process of this script wrote until it ended."""
    if not output.exists():
        return {"complete": False, "rows": []}
    report: dict[str, Any] = json.loads(output.read_text())
    return report


def _end(number: int, frame: object) -> None:
    """What was found is still printed."""
    raise SystemExit(128 + number)


def _obstacle(*, is_tiny: bool) -> str | None:
    """Why what is installed will not do, found before minutes are spent on it."""
    import numpy
    import triton

    numpy_version, triton_version = _release(numpy.__version__), _release(triton.__version__)
    if is_tiny:
        if triton_version < (3, 7) and numpy_version >= (2, 4):
            return f"Triton {triton.__version__} cannot interpret with numpy {numpy.__version__}; install 'numpy<2.4'"
        return None
    if triton_version < LEAST_TRITON:
        least = ".".join(map(str, LEAST_TRITON))
        return f"Triton {triton.__version__}; {least} is the oldest that these kernels were compiled with: update torch"
    compiler = os.environ.get("CC")
    if compiler is None and not any(shutil.which(name) for name in ("gcc", "clang", "cc")):
        return "Triton needs a C compiler, and there is none; install gcc, or name one in CC"
    if compiler is not None and shutil.which(compiler) is None:
        return f"CC={compiler}, which Triton would use, cannot be run; name a C compiler there, or unset it"
    return None


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def missed_targets(rows: list[dict[str, Any]]) -> list[str]:
    """Of what was measured. A target is a share of a ceiling, where the row has one, else the value itself."""
    figures = {row["what"]: row["value"] if row["share"] is None else row["share"] for row in rows}
    return [
        f"{what} is {figures[what]}, {least} wanted"
        for what, least in TARGETS.items()
        if figures.get(what) is not None and figures[what] < least
    ]


if __name__ == "__main__":
    sys.exit(main())
