"""How every benchmark speaks: a table for people, then one line of JSON with the machine and the versions.

Owns the form only. What a figure means is said where it is measured.
"""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

Cell = str | int | float | bool | None

_PACKAGES = ("pagedd", "torch", "triton", "transformers", "numpy")


def print_report(
    benchmark: str, rows: Sequence[Mapping[str, Cell]], figures: Mapping[str, object], *, output: Path | None = None
) -> None:
    """Prints `rows` as a table and `figures` as JSON. The JSON line is the last, so that `tail -1` finds it.

    With `output` the same JSON is also written to that file, indented, so that a change in it can be read.
    """
    report = {"benchmark": benchmark, **figures, **environment()}
    print(table(rows))
    print()
    print(json.dumps(report), flush=True)
    if output is not None:
        write_report(report, output)


def write_report(report: Mapping[str, object], output: Path) -> None:
    """In place of what was there, all or nothing: whoever is ended meanwhile leaves the last one whole."""
    output.parent.mkdir(parents=True, exist_ok=True)
    part = output.with_name(output.name + ".part")
    part.write_text(json.dumps(report, indent=2) + "\n")
    part.replace(output)


def table(rows: Sequence[Mapping[str, Cell]]) -> str:
    """Aligned columns, named by the keys of the first row. Numbers to the right, `None` as "n/a"."""
    if not rows:
        return ""
    names = list(rows[0])
    texts = [names] + [[_text(row[name]) for name in names] for row in rows]
    widths = [max(len(line[i]) for line in texts) for i in range(len(names))]
    is_number = [all(isinstance(row[name], int | float | None) for row in rows) for name in names]
    lines = [
        "  ".join(
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, is_number, strict=True)
        ).rstrip()
        for line in texts
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def markdown(rows: Sequence[Mapping[str, Cell]]) -> str:
    """The same table for a page; a dash where there is no value."""
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    lines += ["| " + " | ".join("–" if cell is None else str(cell) for cell in row.values()) + " |" for row in rows]
    return "\n".join(lines)


def environment() -> dict[str, object]:
    """The machine and the versions that a figure belongs to."""
    return {
        "machine": {
            "cpu": _cpu_model(),
            "num_cpus": len(os.sched_getaffinity(0)),
            "gpu": _gpu_name(),
            "system": platform.platform(),
        },
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
    }


def _text(cell: Cell) -> str:
    if cell is None:
        return "n/a"
    return (
        f"{cell:.4g}"
        if isinstance(cell, float) and abs(cell) < 1000
        else str(round(cell) if isinstance(cell, float) else cell)
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _gpu_name() -> str | None:
    driver = Path("/proc/driver/nvidia/gpus")
    if not driver.is_dir():
        return None
    names = [
        line.partition(":")[2].strip()
        for card in sorted(driver.iterdir())
        for line in (card / "information").read_text().splitlines()
        if line.startswith("Model")
    ]
    return ", ".join(names) or None
