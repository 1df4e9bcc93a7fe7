"""Millions of inputs for everything that reads bytes from outside, led by what they reach in the code.

    python -P -m pagedd.bench.fuzz --runs 1000000

Fails (status 1) at the first reader with an input that raises what the reader may not, that takes over a minute, or
at memory that grows; libFuzzer leaves the input in the working directory, and says its name. Needs atheris
(requirements-fuzz.lock); tests run the same readers with hypothesis.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pagedd.bench.fuzz.targets import TARGETS
from pagedd.bench.report import Cell, print_report

_WORKER = (sys.executable, "-P", "-m", "pagedd.bench.fuzz.worker")
_FLAGS = ("-timeout=60", "-rss_limit_mb=2048", "-print_final_stats=1", "-verbosity=1")


def fuzz(name: str, num_runs: int, seed: int) -> dict[str, Cell]:
    """One reader's row. Raises `RuntimeError` with what libFuzzer said when something was found."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pagedd-fuzz-") as corpus:
        for number, data in enumerate(TARGETS[name].seeds):
            (Path(corpus) / str(number)).write_bytes(data)
        run = subprocess.run(
            [*_WORKER, name, str(num_runs), *_FLAGS, f"-seed={seed}", corpus],
            capture_output=True,
            text=True,
            errors="replace",
        )
    said = run.stdout + run.stderr
    grown = re.search(r"grown by (-?\d+) bytes", said)
    if run.returncode or grown is None:
        raise RuntimeError(f"{name}, status {run.returncode}:\n{said[-6000:]}")
    covered = [int(count) for count in re.findall(r"cov: (\d+)", said)]
    return {
        "reader": name,
        "runs": num_runs,
        "seconds": round(time.monotonic() - started, 1),
        "branches": covered[-1] if covered else None,
        "grown_bytes": int(grown[1]),
    }


def main(argv: list[str] | None = None) -> int:
    """Entry point; the exit status."""
    parser = argparse.ArgumentParser(prog="pagedd.bench.fuzz", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=1_000_000, help="inputs for all readers together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=TARGETS, action="append", help="this reader; all by default")
    parser.add_argument("--output", type=Path, help="write the figures to this file as well")
    arguments = parser.parse_args(argv)
    names = arguments.only or list(TARGETS)
    weights = sum(TARGETS[name].weight for name in names)
    rows = []
    for name in names:
        try:
            rows.append(fuzz(name, -(-arguments.runs * TARGETS[name].weight // weights), arguments.seed))
        except RuntimeError as found:
            print(found, file=sys.stderr)
            return 1
    figures = {"seed": arguments.seed, "runs": sum(int(row["runs"] or 0) for row in rows), "readers": rows}
    print_report("fuzz", rows, figures, output=arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
