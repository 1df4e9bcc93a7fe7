"""One reader under atheris, in a process of its own: libFuzzer ends the process, with status 0 when nothing was found.

    python -P -m pagedd.bench.fuzz.worker READER NUM_RUNS [LIBFUZZER'S FLAGS]

Beside crashes and hangs, which libFuzzer finds, memory that grows from the second half of the runs to their end is one.
"""

import gc
import os
import sys

import atheris
import psutil

with atheris.instrument_imports(include=["pagedd"]):
    from pagedd.bench.fuzz.targets import TARGETS

from pagedd.daemon.parent import die_with_parent

# libFuzzer keeps what it found interesting, and Python its arenas.
MAX_GROWTH_BYTES = 64 << 20


def resident_bytes() -> int:
    """Of this process."""
    return int(psutil.Process().memory_info().rss)


class Growth:
    """Counts runs, and compares the memory held at their half with that at their end."""

    def __init__(self, num_runs: int) -> None:
        self._num_runs = num_runs
        self._run = 0
        self._before = 0

    def next_run(self) -> None:
        """Raises `MemoryError`."""
        self._run += 1
        if self._run == self._num_runs // 2:
            gc.collect()
            self._before = resident_bytes()
        elif self._run == self._num_runs:
            gc.collect()
            grown = resident_bytes() - self._before
            print(f"grown by {grown} bytes", flush=True)
            if grown > MAX_GROWTH_BYTES:
                raise MemoryError(f"{grown} bytes more after {self._num_runs} runs than after half of them")


def main() -> None:
    die_with_parent(os.getppid())
    name, num_runs, *flags = sys.argv[1:]
    target = TARGETS[name]
    growth = Growth(int(num_runs))

    def run(data: bytes) -> None:
        growth.next_run()
        target.read(data)

    atheris.Setup([sys.argv[0], f"-runs={num_runs}", f"-max_len={target.max_bytes}", *flags], run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
