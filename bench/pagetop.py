"""What pagetop costs: CPU of the real program in a terminal, fed by a publisher at the daemon's pace.

    python -P -m pagedd.bench.pagetop
    python -P -m pagedd.bench.pagetop --seconds 30 --blocks 100000

The program runs as `pagetop` in a pseudo-terminal of 160 × 48 cells and subscribes to a stats socket, on which frames
that were made before are published four times a second. CPU is the process's own user and system time, over a stretch
that begins when the first picture has been up for two seconds; 100 % is one core. `first_paint_ms` counts from the
start of the process to the first byte of a picture with a frame in it.
"""

import argparse
import os
import select
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import zmq

from pagedd.bench.frames import FakeEngine
from pagedd.bench.report import print_report
from pagedd.bench.terminal import start_in_terminal
from pagedd.client.endpoints import Endpoints, ipc
from pagedd.client.protocol import encode

INTERVAL_S = 0.25
COLUMNS, LINES = 160, 48
_SETTLE_S = 2.0
_FIRST_PAINT_LIMIT_S = 30.0
# A word that only a picture with a frame in it has.
PAINTED = b"fragmentation"


@dataclass(frozen=True, slots=True)
class Cost:
    """`cpu_percent` of one core; `output_bytes_per_s` is what was written to the terminal."""

    first_paint_ms: float
    cpu_percent: float
    output_bytes_per_s: float
    frame_bytes: int


def measure(frames: list[bytes], *, keys: bytes = b"") -> Cost:
    """Runs pagetop on `frames` until they are all shown. `keys` are typed once the first picture is there."""
    with tempfile.TemporaryDirectory(prefix="pagetop-bench-") as directory:
        context = zmq.Context()
        publisher = context.socket(zmq.XPUB)
        publisher.bind(ipc(Endpoints(Path(directory)).stats))
        started_s = time.perf_counter()
        command = [sys.executable, "-P", "-m", "pagedd.tui.app", "--runtime-dir", directory]
        process, terminal = start_in_terminal(command, LINES, COLUMNS, {"COLORTERM": "truecolor"})
        try:
            publisher.poll(int(_FIRST_PAINT_LIMIT_S * 1000))
            publisher.send(frames[0])
            painted_s = _until_painted(terminal)
            os.write(terminal, keys)
            settled_s = time.perf_counter() + _SETTLE_S
            meter = psutil.Process(process.pid)
            before = None
            begun_s, num_bytes = 0.0, 0
            for frame in frames[1:]:
                due_s = time.perf_counter() + INTERVAL_S
                publisher.send(frame)
                num_bytes += _drain(terminal, due_s)
                if before is None and time.perf_counter() >= settled_s:
                    before, begun_s, num_bytes = meter.cpu_times(), time.perf_counter(), 0
            if before is None:
                raise RuntimeError(f"{len(frames)} frames are over before {_SETTLE_S:g} s are; give more --seconds")
            after, wall_s = meter.cpu_times(), time.perf_counter() - begun_s
        finally:
            process.kill()
            process.wait()
            os.close(terminal)
            context.destroy(linger=0)
    cpu_s = after.user + after.system - before.user - before.system
    return Cost((painted_s - started_s) * 1000, 100 * cpu_s / wall_s, num_bytes / wall_s, len(frames[-1]))


def make_frames(num_blocks: int, num_requests: int, num_frames: int) -> list[bytes]:
    """A pool that `num_requests` sequences use most of, each decoding."""
    tokens = num_blocks * 16 // num_requests
    engine = FakeEngine(
        num_blocks=num_blocks,
        num_requests=num_requests,
        max_num_seqs=num_requests,
        prompt_tokens=(tokens // 2, tokens),
        chunk_tokens=max(512, tokens // 16),
    )
    for _ in range(40):
        engine.frame()
    return [encode(engine.frame()) for _ in range(num_frames)]


def _until_painted(terminal: int) -> float:
    seen = b""
    limit_s = time.perf_counter() + _FIRST_PAINT_LIMIT_S
    while time.perf_counter() < limit_s:
        if select.select([terminal], [], [], 0.05)[0]:
            seen += os.read(terminal, 1 << 16)
            if PAINTED in seen:
                return time.perf_counter()
    raise RuntimeError(f"no picture within {_FIRST_PAINT_LIMIT_S:g} s; the terminal got {seen[-2000:]!r}")


def _drain(terminal: int, until_s: float) -> int:
    num_bytes = 0
    while (left_s := until_s - time.perf_counter()) > 0:
        if select.select([terminal], [], [], left_s)[0]:
            num_bytes += len(os.read(terminal, 1 << 16))
    return num_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement (default %(default)s)")
    parser.add_argument("--blocks", type=int, nargs="+", default=[10_000, 100_000], help="pools to measure")
    parser.add_argument("--requests", type=int, default=64, help="live ones (default %(default)s)")
    arguments = parser.parse_args()
    rows = []
    for num_blocks in arguments.blocks:
        frames = make_frames(num_blocks, arguments.requests, int((arguments.seconds + _SETTLE_S) / INTERVAL_S) + 2)
        for screen, keys in (("overview", b""), ("blocks", b"2")):
            cost = measure(frames, keys=keys)
            rows.append(
                {
                    "blocks": num_blocks,
                    "screen": screen,
                    "cpu_percent": round(cost.cpu_percent, 2),
                    "first_paint_ms": round(cost.first_paint_ms),
                    "output_bytes_per_s": round(cost.output_bytes_per_s),
                    "frame_bytes": cost.frame_bytes,
                }
            )
    print_report("pagetop", rows, {"requests": arguments.requests, "columns": COLUMNS, "lines": LINES})


if __name__ == "__main__":
    main()
