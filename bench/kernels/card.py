"""How a card is measured: the time of one launch, what it copies and multiplies at best, the form of a kernel's table.

What a kernel has to move, and why, is said in its own module.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from pagedd.bench.report import Cell, print_report

# More than any card's second-level cache holds; and to read it takes longer than Python takes to queue a launch. It is
# read, not written: what is written would still be on its way to memory while the kernel is timed.
_FLUSHED_BYTES = 512 << 20
_LEAST_LAUNCHES, _MOST_LAUNCHES = 10, 300


def this_card() -> torch.device:
    """
    Raises:
        SystemExit: there is none.
    """
    if not torch.cuda.is_available():
        raise SystemExit("this measures a GPU, and there is none; `make kernels-aot` says what can be said without")
    return torch.device("cuda")


def seconds_of(launch: Callable[[], object], device: torch.device, budget_s: float = 0.2) -> float:
    """The device's time for one call of `launch`, the median of many, each with a cold second-level cache.

    The call is captured as a graph and all repetitions are queued before anybody waits, so that no time of Python is
    in it. On a CPU, which proves the script and no more, the time of one call.
    """
    launch()  # compiles
    if device.type != "cuda":
        started = time.perf_counter()
        launch()
        return time.perf_counter() - started
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    flushed = torch.zeros(_FLUSHED_BYTES // 4, device=device)

    def repeat(count: int) -> list[float]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]  # type: ignore[no-untyped-call]
        for begin, end in events:
            flushed.amax()
            begin.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize(device)
        return [begin.elapsed_time(end) / 1e3 for begin, end in events]

    started = time.perf_counter()
    repeat(_LEAST_LAUNCHES)
    one_s = (time.perf_counter() - started) / _LEAST_LAUNCHES
    return statistics.median(repeat(max(_LEAST_LAUNCHES, min(_MOST_LAUNCHES, int(budget_s / one_s)))))


def warm_up(device: torch.device, dtype: torch.dtype, seconds: float = 0.5) -> None:
    """Multiplies for so long: a card that was idle runs slowly at first, and what is measured first would show it."""
    if device.type != "cuda":
        return
    a, started = torch.randn(4096, 4096, device=device).to(dtype), time.perf_counter()
    while time.perf_counter() - started < seconds:
        for _ in range(20):
            a @ a
        torch.cuda.synchronize(device)


def copy_rate(device: torch.device, num_bytes: int = 1 << 30) -> float:
    """Bytes a second, read and written counted both, of a copy that is too large for any cache."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds_of(lambda: target.copy_(source), device)


def product_rate(device: torch.device, size: int = 8192, dtype: torch.dtype = torch.bfloat16) -> float:
    """Operations a second of a square product, through torch, of random numbers: on zeros a card would run faster."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / seconds_of(lambda: a @ b, device)


def row(
    name: str,
    launch: Callable[[], object],
    device: torch.device,
    num_bytes: int,
    copied: float,
    num_operations: int = 0,
) -> dict[str, Cell]:
    """One line of the table.

    Args:
        num_bytes: what it has to move at least.
        copied: as `copy_rate` gives it.
        num_operations: of its products, if they matter.
    """
    seconds = seconds_of(launch, device)
    rate = num_bytes / seconds
    return {
        "case": name,
        "microseconds": seconds * 1e6,
        "GB/s": rate / 1e9,
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
    copied = copy_rate(device)
    rows = measure(device, copied)
    print_report(benchmark, rows, {"copy_bytes_per_second": copied, "cases": rows}, output=arguments.output)
