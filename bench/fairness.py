"""A calm caller's time to first token, alone and beside a greedy one that asks for ten times its quota.

    python -P -m pagedd.bench.fairness --model PATH

One daemon a row, two API keys. The calm one asks once every third of a second for 32 tokens after 256. The greedy one
asks for ten times its quota, whatever it is told; in the last row it has no quota, and takes its turns alone.
"""

import argparse
import asyncio
import contextlib
import json
import random
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from pagedd.bench.daemon_process import free_port, running_daemon
from pagedd.bench.load import LoadClient, LoadRequest, percentile
from pagedd.bench.report import Cell, print_report

TOKENS_PER_MINUTE = 6000
MAX_REQUESTS = 2
FACTOR = 10
GREEDY_PROMPT, GREEDY_OUTPUT = 96, 32
CALM_PROMPT, CALM_OUTPUT = 256, 32
CALM_INTERVAL_S = 1 / 3
_VOCAB = (10, 49152)
_MAX_UNDER_WAY = 64


@dataclass(slots=True)
class Answers:
    """What the greedy caller was told, by HTTP status."""

    num_taken: int = 0
    num_refused: int = 0


async def be_greedy(url: str, key: str, answers: Answers, draw: random.Random) -> None:
    """Asks for `FACTOR` times the quota until cancelled, without regard to Retry-After."""
    tokens_per_s = FACTOR * TOKENS_PER_MINUTE / 60
    under_way: set[asyncio.Task[None]] = set()
    loop = asyncio.get_running_loop()
    due_s = loop.time()
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as session:

        async def ask() -> None:
            prompt = [draw.randrange(*_VOCAB) for _ in range(GREEDY_PROMPT)]
            body = {"prompt": prompt, "max_tokens": GREEDY_OUTPUT, "ignore_eos": True}
            async with session.post(f"{url}/v1/completions", json=body) as response:
                await response.read()
                answers.num_taken += response.status == 200
                answers.num_refused += response.status == 429

        try:
            while True:
                if len(under_way) < _MAX_UNDER_WAY:
                    task = asyncio.create_task(ask())
                    under_way.add(task)
                    task.add_done_callback(under_way.discard)
                due_s += (GREEDY_PROMPT + GREEDY_OUTPUT) / tokens_per_s
                await asyncio.sleep(due_s - loop.time())
        finally:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)


async def be_calm(url: str, key: str, num_requests: int, draw: random.Random) -> list[float]:
    """Times to first token, in s."""
    client = LoadClient(url, api_key=key)
    ttfts = []
    for _ in range(num_requests):
        request = LoadRequest([draw.randrange(*_VOCAB) for _ in range(CALM_PROMPT)], CALM_OUTPUT)
        result = await client.run([request], num_warmups=0)
        ttfts.append(result.timings[0].ttft_s)
        await asyncio.sleep(CALM_INTERVAL_S)
    return ttfts


@contextlib.asynccontextmanager
async def daemon_with_keys(flags: list[str], *, has_quota: bool) -> AsyncIterator[str]:
    """A daemon for the keys `calm` and `greedy`; its URL."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="pagedd-bench-") as directory:
        keys, config = Path(directory) / "keys", Path(directory) / "pagedd.toml"
        keys.write_text("calm calm\ngreedy greedy\n")
        quota = f"tokens_per_minute = {TOKENS_PER_MINUTE}\nmax_requests = {MAX_REQUESTS}\n" if has_quota else ""
        config.write_text(f"http_port = {port}\napi_key_file = {json.dumps(str(keys))}\n[quota.key.greedy]\n{quota}")
        async with running_daemon(["--config", str(config), *flags]):
            yield f"http://127.0.0.1:{port}"


async def measure(flags: list[str], num_requests: int, *, has_greedy: bool, has_quota: bool) -> dict[str, Cell]:
    draw, answers = random.Random(7), Answers()
    async with daemon_with_keys(flags, has_quota=has_quota) as url:
        await be_calm(url, "calm", 3, draw)
        greedy = asyncio.create_task(be_greedy(url, "greedy", answers, draw)) if has_greedy else None
        if greedy is not None:
            await asyncio.sleep(2.0)
        ttfts = await be_calm(url, "calm", num_requests, draw)
        if greedy is not None:
            greedy.cancel()
            await asyncio.wait([greedy])
    p50, p95 = percentile(ttfts, 0.5), percentile(ttfts, 0.95)
    return {
        "greedy": ("with its quota" if has_quota else "without a quota") if has_greedy else "absent",
        "ttft_p50_ms": None if p50 is None else round(1000 * p50, 1),
        "ttft_p95_ms": None if p95 is None else round(1000 * p95, 1),
        "greedy_taken": answers.num_taken,
        "greedy_refused": answers.num_refused,
    }


async def run(flags: list[str], num_requests: int) -> list[dict[str, Cell]]:
    rows = []
    for has_greedy, has_quota in ((False, True), (True, True), (True, False)):
        rows.append(await measure(flags, num_requests, has_greedy=has_greedy, has_quota=has_quota))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="what to serve (default: the daemon's)")
    parser.add_argument("-n", type=int, default=60, help="requests of the calm caller in a row (default %(default)s)")
    parser.add_argument("--num-threads", help="of the daemon")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the figures there too")
    args = parser.parse_args()
    flags = [flag for name in ("model", "num_threads") if (value := getattr(args, name)) for flag in _flag(name, value)]
    rows = asyncio.run(run(flags, args.n))
    quota = {"tokens_per_minute": TOKENS_PER_MINUTE, "max_requests": MAX_REQUESTS, "factor": FACTOR}
    settings = quota | {"n": args.n, "num_threads": args.num_threads}
    print_report("fairness", rows, settings | {"rows": rows}, output=args.output)


def _flag(name: str, value: str) -> tuple[str, str]:
    return "--" + name.replace("_", "-"), value


if __name__ == "__main__":
    main()
