"""How every kernel's benchmark measures: the median time of a launch with a cold L2, beside what the card can copy.

Owns the form only: what a kernel has to move, and why, is said in its own module.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from triton.testing import do_bench

from pagedd.bench.report import Cell, print_report

_COPIED_BYTES = 1 << 30


def this_card() -> torch.device:
    """
    Raises:
        SystemExit: there is none.
    """
    if not torch.cuda.is_available():
        raise SystemExit("this measures a GPU, and there is none; `make kernels-aot` says what can be said without")
    return torch.device("cuda")


def copy_gb_per_s(device: torch.device) -> float:
    """What is read and written, over the time, of a copy too large for any cache."""
    source = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPIED_BYTES / _seconds(lambda: target.copy_(source)) / 1e9


def row(
    name: str, launch: Callable[[], object], num_bytes: int, copied: float, num_operations: int = 0
) -> dict[str, Cell]:
    """One line of the table.

    Args:
        num_bytes: what it has to move at least.
        copied: as `copy_gb_per_s` gives it.
        num_operations: of its products, if they matter.
    """
    seconds = _seconds(launch)
    rate = num_bytes / seconds / 1e9
    return {
        "case": name,
        "microseconds": seconds * 1e6,
        "GB/s": rate,
        "of a copy's": f"{rate / copied:.0%}",
        "TFLOP/s": num_operations / seconds / 1e12 if num_operations else None,
    }


def report(
    benchmark: str, measure: Callable[[torch.device, float], list[dict[str, Cell]]], argv: list[str] | None
) -> None:
    """The program around a benchmark: `measure` gets the device and the rate of its copies, and returns the table."""
    parser = argparse.ArgumentParser(description=f"Measures {benchmark} on this machine's GPU.")
    parser.add_argument("--output", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args(argv)
    device = this_card()
    copied = copy_gb_per_s(device)
    rows = measure(device, copied)
    print_report(benchmark, rows, {"copy_gb_per_s": copied, "cases": rows}, output=arguments.output)


def _seconds(launch: Callable[[], object]) -> float:
    return float(do_bench(launch, return_mode="median")) / 1e3
