"""A daemon with more to do than it can: who is refused, who is served, and whether it still answers a monitor.

    python -P -m pagedd.bench.overload --model PATH

500 connections ask for 10 000 short completions as fast as they are answered, of a daemon with a queue of 64. Every
request has to be served in full or refused with 429 and a Retry-After; `/health` is asked all the while by a process of
its own, and its slowest answer has a limit. Fails (status 1) with a sentence for each thing that is wrong.
"""

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from pagedd.bench.daemon_process import running_daemon
from pagedd.bench.load import percentile
from pagedd.bench.report import Cell, print_report

FLAGS = ("--max-queued-requests", "64", "--max-model-len", "512", "--kv-quality-check", "off")
NUM_TOKENS = 4
HEALTH_LIMIT_S = 0.25
_PROBE_INTERVAL_S = 0.02


@dataclass(slots=True)
class Answers:
    """What the crowd was told.

    Attributes:
        latencies_s: of all answers, by HTTP status.
        wrong: what should not have happened, and how often.
    """

    latencies_s: dict[int, list[float]] = field(default_factory=dict)
    wrong: Counter[str] = field(default_factory=Counter)

    def num(self, status: int) -> int:
        return len(self.latencies_s.get(status, ()))


async def crowd(http_socket: Path, num_connections: int, num_requests: int) -> Answers:
    """Asks for `num_requests` over so many connections, each of which asks again as soon as it is answered."""
    answers = Answers()
    numbers = iter(range(num_requests))

    async def one() -> None:
        # A connector each, so that it is one connection, which stays.
        connector = aiohttp.UnixConnector(str(http_socket), limit=1)
        async with aiohttp.ClientSession("http://localhost", connector=connector) as http:
            for number in numbers:
                await _ask(http, number, answers)

    await asyncio.gather(*(one() for _ in range(num_connections)))
    return answers


async def _ask(http: aiohttp.ClientSession, number: int, answers: Answers) -> None:
    body = {"prompt": f"{number} is a number", "max_tokens": NUM_TOKENS, "ignore_eos": True}
    started = time.perf_counter()
    try:
        async with http.post("/v1/completions", json=body) as response:
            answer = await response.json()
    except (aiohttp.ClientError, OSError) as error:
        answers.wrong[f"{type(error).__name__}: {error}"] += 1
        return
    answers.latencies_s.setdefault(response.status, []).append(time.perf_counter() - started)
    if response.status == 200:
        if answer["usage"]["completion_tokens"] != NUM_TOKENS:
            answers.wrong["an answer that was cut"] += 1
    elif response.status != 429:
        answers.wrong[f"status {response.status}, {answer['error']['code']}"] += 1
    elif not response.headers.get("Retry-After", "").isdecimal():
        answers.wrong["429 without Retry-After"] += 1


@contextlib.asynccontextmanager
async def health_probe(http_socket: Path) -> AsyncIterator[list[float]]:
    """Asks for `/health` meanwhile; the list has the seconds that each answer took, when the block has ended."""
    latencies_s: list[float] = []
    # Of its own, so that it measures the daemon and not this process.
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "pagedd.bench.overload", "--probe", str(http_socket), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        await process.stdout.readline()  # it has begun
        yield latencies_s
    finally:
        process.send_signal(signal.SIGTERM)
        output, _ = await process.communicate()
        latencies_s += json.loads(output)


async def probe(http_socket: Path) -> None:
    """Until SIGTERM; then prints the seconds of all answers as JSON. Raises `RuntimeError` for one that is not 200."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    latencies_s = []
    async with aiohttp.ClientSession("http://localhost", connector=aiohttp.UnixConnector(str(http_socket))) as http:
        print(flush=True)
        while not stop.is_set():
            started = time.perf_counter()
            async with http.get("/health") as response:
                if response.status != 200:
                    raise RuntimeError(f"/health answered {response.status}")
                await response.read()
            latencies_s.append(time.perf_counter() - started)
            await asyncio.sleep(_PROBE_INTERVAL_S)
    print(json.dumps(latencies_s), flush=True)


async def overload(flags: list[str], num_connections: int, num_requests: int) -> tuple[Answers, list[float], float]:
    """The answers, the latencies of `/health`, and how long it all took, seconds."""
    async with running_daemon([*FLAGS, *flags]) as daemon:
        started = time.perf_counter()
        async with health_probe(daemon.http_socket) as health_s:
            answers = await crowd(daemon.http_socket, num_connections, num_requests)
        return answers, health_s, time.perf_counter() - started


def main(argv: list[str] | None = None) -> int:
    """Entry point; the exit status."""
    parser = argparse.ArgumentParser(prog="pagedd.bench.overload", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--connections", type=int, default=500)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--model", help="a model's path or name")
    parser.add_argument("--output", type=Path, help="write the figures to this file as well")
    parser.add_argument("--probe", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.probe is not None:
        asyncio.run(probe(arguments.probe))
        return 0
    flags = ["--model", arguments.model] if arguments.model is not None else []
    answers, health_s, duration_s = asyncio.run(overload(flags, arguments.connections, arguments.requests))
    wrong = [f"{count} times {what}" for what, count in answers.wrong.items()]
    if max(health_s) > HEALTH_LIMIT_S:
        wrong.append(f"/health took {max(health_s):.3f} s, limit {HEALTH_LIMIT_S}")
    rows = [_row(str(status), latencies_s) for status, latencies_s in sorted(answers.latencies_s.items())]
    rows.append(_row("/health", health_s))
    figures = {
        "connections": arguments.connections,
        "requests": arguments.requests,
        "duration_s": round(duration_s, 1),
        "answers": rows,
        "wrong": wrong,
    }
    print_report("overload", rows, figures, output=arguments.output)
    for sentence in wrong:
        print(f"WRONG: {sentence}", file=sys.stderr)
    return 1 if wrong else 0


def _row(answer: str, latencies_s: list[float]) -> dict[str, Cell]:
    def at(share: float) -> float | None:
        value = percentile(latencies_s, share)
        return None if value is None else round(1e3 * value, 1)

    return {"answer": answer, "num": len(latencies_s), "p50_ms": at(0.5), "p99_ms": at(0.99), "max_ms": at(1)}


if __name__ == "__main__":
    sys.exit(main())
