"""Time to first token of a long prefix, by where its KV is found: nowhere, in the pool, in host memory, on the disk.

    python -P -m pagedd.bench.tiers --model PATH

Some prefixes, each asked for with another end every time. The pool holds two of them, so that the second round finds
them in host memory; then the daemon is stopped and started again, and finds them on the disk.

    found in     what the first token waits for
    nowhere      the whole prompt is computed
    pool         the end is computed
    host         the prefix is copied into the pool, the end is computed
    disk         the same after a restart: the prefix is read, checked and copied
"""

import argparse
import asyncio
import random
import re
import tempfile
import time
from pathlib import Path

import aiohttp

from pagedd.bench.daemon_process import RunningDaemon, running_daemon
from pagedd.bench.load import LoadClient, LoadRequest, percentile
from pagedd.bench.report import Cell, print_report
from pagedd.daemon.models import DEFAULT_MODEL, pull_model

BLOCK_SIZE = 16
END_TOKENS = 16
OUTPUT_TOKENS = 4
_VOCAB = (10, 49152)
_NUM_WARMUPS = 2


class Prefixes:
    """Random ones, the same in every run."""

    def __init__(self, num_prefixes: int, num_tokens: int) -> None:
        self._draw = random.Random(7)
        self._prefixes = [self._ids(num_tokens) for _ in range(num_prefixes)]

    def requests(self) -> list[LoadRequest]:
        """One for each prefix, each with a new end."""
        return [LoadRequest(prefix + self._ids(END_TOKENS), OUTPUT_TOKENS) for prefix in self._prefixes]

    def _ids(self, count: int) -> list[int]:
        return [self._draw.randrange(*_VOCAB) for _ in range(count)]


async def first_tokens(daemon: RunningDaemon, requests: list[LoadRequest]) -> list[float]:
    """Seconds of each, one request after another."""
    client = LoadClient("http://localhost", unix_socket=str(daemon.http_socket))
    result = await client.run(requests, concurrency=1, num_warmups=_NUM_WARMUPS)
    return [timing.ttft_s for timing in result.timings]


async def tier_figures(daemon: RunningDaemon) -> dict[str, float]:
    """The samples of `/metrics` about tiers, by their name and tier: `promotions_total/host`."""
    connector = aiohttp.UnixConnector(str(daemon.http_socket))
    async with aiohttp.ClientSession(connector=connector) as session, session.get("http://localhost/metrics") as answer:
        text = await answer.text()
    found = re.findall(r'^pagedd:kv_tier_(\w+)\{.*tier="(\w+)"\} (\S+)$', text, re.M)
    return {f"{name}/{tier}": float(value) for name, tier, value in found}


async def measure(
    flags: list[str], num_prefixes: int, num_tokens: int
) -> tuple[list[dict[str, Cell]], dict[str, Cell]]:
    """A row for each place, and what saving, loading and the restart took."""
    prefixes = Prefixes(num_prefixes, num_tokens)
    seconds: dict[str, list[float]] = {"nowhere": [], "pool": []}
    async with running_daemon(flags) as daemon:
        for request, again in zip(prefixes.requests(), prefixes.requests(), strict=True):
            seconds["nowhere"] += await first_tokens(daemon, [request])
            seconds["pool"] += await first_tokens(daemon, [again])
        seconds["host"] = await first_tokens(daemon, prefixes.requests())
        before = await tier_figures(daemon)
        stopping = time.perf_counter()
    stopped_s = time.perf_counter() - stopping
    async with running_daemon(flags) as daemon:
        seconds["disk"] = await first_tokens(daemon, prefixes.requests())
        after = await tier_figures(daemon)
    cold_s = percentile(seconds["nowhere"], 0.5) or float("nan")
    num_blocks = num_prefixes * (num_tokens // BLOCK_SIZE)
    promotions = {"host": before["promotions_total/host"], "disk": after["promotions_total/disk"]}
    rows: list[dict[str, Cell]] = []
    for place, times in seconds.items():
        median_s = percentile(times, 0.5) or float("nan")
        found = promotions[place] / num_blocks if place in promotions else None
        rows.append(
            {
                "found in": place,
                "first token ms": round(1000 * median_s, 1),
                "of cold": round(median_s / cold_s, 3),
                "blocks found": found,
            }
        )
    figures: dict[str, Cell] = {
        "save_ms_per_block": _each_ms(before, "write_seconds_total/host", "stored_total/host"),
        "load_ms_per_block": _each_ms(before, "read_seconds_total/host", "promotions_total/host"),
        "disk_read_ms_per_block": _each_ms(after, "read_seconds_total/disk", "promotions_total/disk"),
        "disk_bytes": after["bytes/disk"],
        "stop_s": round(stopped_s, 2),
        "start_s": round(daemon.ready_s, 2),
    }
    return rows, figures


def _each_ms(figures: dict[str, float], seconds: str, count: str) -> Cell:
    return round(1000 * figures[seconds] / figures[count], 4) if figures[count] else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="path of what to serve (default: the daemon's model)")
    parser.add_argument("-n", type=int, default=5, help="prefixes (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=2000, help="of a prefix (default %(default)s)")
    parser.add_argument("--kv-cache-dtype", default="auto", help="as of the daemon (default %(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the figures there too")
    args = parser.parse_args()
    model = args.model or str(pull_model(DEFAULT_MODEL.name, report=print))
    num_blocks = (2 * args.tokens + args.tokens // 2) // BLOCK_SIZE
    flags = ["--model", model, "--num-blocks", str(num_blocks), "--kv-cache-dtype", args.kv_cache_dtype]
    with tempfile.TemporaryDirectory(prefix="pagedd-bench-") as directory:
        flags += ["--kv-host-gib", "1", "--kv-disk-gib", "1", "--kv-disk-directory", directory]
        rows, figures = asyncio.run(measure(flags, args.n, args.tokens))
    settings = {"n": args.n, "tokens": args.tokens, "kv_cache_dtype": args.kv_cache_dtype}
    print_report("tiers", rows, settings | figures | {"rows": rows}, output=args.output)


if __name__ == "__main__":
    main()
