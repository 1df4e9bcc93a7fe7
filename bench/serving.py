"""pagedd against its peers on the same machine: four loads, one server at a time, in rounds.

    python -P -m pagedd.bench.serving --peers DIR --rounds 3

`DIR` holds the peers, each where its own build puts it, and the model in the formats that they read (`servers.py` has
the paths and the flags); those that are absent are skipped. pagedd is a real daemon, asked over its Unix socket;
llama.cpp and vLLM are asked over HTTP too, OpenVINO GenAI in a process of its own through pipes.

In a round each server is started, warmed up, given the loads, and stopped before the next one starts. Each load of each
round has prompts of its own, so that a prefix cache helps only inside the `prefix` load, which shares one on purpose.
Rounds interleave the servers, so that a slow minute of the machine meets them all.

    single       4 requests one after the other: output tokens/s
    throughput   64 requests, 32 at once: output tokens/s
    prefix       32 requests at once that share 512 of 544 prompt tokens: output tokens/s
    longprompt   8 requests at once with prompts of 1024: prompt and output tokens/s

Figures are medians over rounds. The ratio is pagedd's median over that of the best peer; in brackets the least and the
largest ratio to that peer inside one round. Memory is the peak of resident sizes, summed over a server's processes.
"""

import argparse
import asyncio
import shlex
import signal
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from pagedd.bench.load import DEFAULT_COUNTS, make_load
from pagedd.bench.peak_memory import PeakMemory
from pagedd.bench.report import Cell, print_report
from pagedd.bench.servers import LoadOutcome, Server, pagedd_server, peer_servers
from pagedd.daemon.models import pull_model

OURS = "pagedd"
CONCURRENCY = {"single": 1, "throughput": 32, "prefix": 32, "longprompt": 8}
TARGET_RATIOS = {"single": 1.25, "throughput": 2.0, "prefix": 2.0, "longprompt": 1.3}


@dataclass(frozen=True, slots=True)
class Turn:
    """One server in one round: what it did with each load, in MB what it held, in seconds how long it took to start."""

    server: str
    outcomes: Mapping[str, LoadOutcome]
    peak_mb: float
    ready_s: float


async def run_turn(server: Server, loads: Sequence[str], num_requests: Mapping[str, int], *, seed: int) -> Turn:
    """Starts `server`, gives it the loads, stops it. Raises `RuntimeError` when it fails at any of that."""
    outcomes: dict[str, LoadOutcome] = {}
    async with server.start() as running:
        async with PeakMemory(running.pid) as memory:
            for kind in loads:
                load = make_load(kind, num_requests[kind], seed=load_seed(seed, kind))
                outcomes[kind] = await running.run(load, concurrency=CONCURRENCY[kind])
                print(f"  {server.name}: {kind} {rate(kind, outcomes[kind]):.0f} tokens/s", flush=True)
        return Turn(server.name, outcomes, memory.peak_bytes / 1e6, running.ready_s)


def load_seed(seed: int, kind: str) -> int:
    """A seed of its own for each load: with one for all, a load's first prompt would begin with another's."""
    return seed * len(CONCURRENCY) + list(CONCURRENCY).index(kind)


def rate(kind: str, outcome: LoadOutcome) -> float:
    """Tokens per second, of the kind that the load is about: a long prompt is mostly prefill."""
    return outcome.total_tokens_per_s if kind == "longprompt" else outcome.output_tokens_per_s


async def run_rounds(servers: Sequence[Server], args: argparse.Namespace) -> tuple[list[Turn], dict[str, str]]:
    """All turns that were completed, and for each peer that failed the reason, after which it got no further turn."""
    turns: list[Turn] = []
    failures: dict[str, str] = {}
    for round_number in range(args.rounds):
        print(f"round {round_number + 1} of {args.rounds}", flush=True)
        for server in servers:
            if server.name in failures:
                continue
            try:
                turns.append(await run_turn(server, args.loads, args.num_requests, seed=args.seed + round_number))
            except (RuntimeError, OSError, aiohttp.ClientError) as error:
                if server.name == OURS:
                    raise
                failures[server.name] = f"{type(error).__name__}: {error}"
                print(f"  {server.name} failed and is left out from here: {error}", flush=True)
    return turns, failures


def summarize(turns: Sequence[Turn], loads: Sequence[str]) -> tuple[list[dict[str, Cell]], dict[str, object]]:
    """One row for each load, then peak memory and start; and the same as figures, with every round."""
    names = list(dict.fromkeys(turn.server for turn in turns))
    rows: list[dict[str, Cell]] = []
    by_load: dict[str, object] = {}
    for kind in loads:
        rates = {n: [rate(kind, turn.outcomes[kind]) for turn in turns if turn.server == n] for n in names}
        medians = {name: statistics.median(values) for name, values in rates.items()}
        best = max((name for name in names if name != OURS), key=lambda name: medians[name], default=None)
        ratio = _ratio(rates, best)
        rows.append(
            {
                "load": kind,
                **medians,
                "best peer": best or "n/a",
                "ratio": f"{ratio['median']:.2f} ({ratio['min']:.2f}–{ratio['max']:.2f})" if ratio else "n/a",
                "target": TARGET_RATIOS[kind],
            }
        )
        by_load[kind] = {
            "unit": "total_tokens_per_s" if kind == "longprompt" else "output_tokens_per_s",
            "servers": {
                name: {
                    "median": round(medians[name], 1),
                    "rounds": [round(value, 1) for value in rates[name]],
                    "ttft_p50_ms": _median_ttft_ms([turn.outcomes[kind] for turn in turns if turn.server == name]),
                }
                for name in names
            },
            "best_peer": best,
            "ratio": ratio,
            "target_ratio": TARGET_RATIOS[kind],
        }
    peaks = {name: max(turn.peak_mb for turn in turns if turn.server == name) for name in names}
    starts = {name: statistics.median(turn.ready_s for turn in turns if turn.server == name) for name in names}
    blank: dict[str, Cell] = {"best peer": "", "ratio": "", "target": None}
    rows += [{"load": "peak memory, MB", **peaks, **blank}, {"load": "start, s", **starts, **blank}]
    figures = {
        "by_load": by_load,
        "peak_memory_mb": {name: round(value) for name, value in peaks.items()},
        "ready_s": {name: round(value, 2) for name, value in starts.items()},
    }
    return rows, figures


def _ratio(rates: Mapping[str, Sequence[float]], best: str | None) -> dict[str, float] | None:
    if OURS not in rates or best is None:
        return None
    # Shorter for a peer that failed in a later round.
    in_rounds = [ours / theirs for ours, theirs in zip(rates[OURS], rates[best], strict=False)]
    ratios = {
        "median": statistics.median(rates[OURS]) / statistics.median(rates[best]),
        "min": min(in_rounds),
        "max": max(in_rounds),
    }
    return {name: round(value, 3) for name, value in ratios.items()}


def _median_ttft_ms(outcomes: Sequence[LoadOutcome]) -> float | None:
    seconds = [outcome.ttft_p50_s for outcome in outcomes if outcome.ttft_p50_s is not None]
    return round(1e3 * statistics.median(seconds), 1) if seconds else None


def choose_servers(servers: Sequence[Server], names: Sequence[str] | None) -> tuple[list[Server], dict[str, str]]:
    """Those asked for (all by default) that are there, and for each other of those the reason.

    Raises:
        ValueError: a name that none of `servers` has.
    """
    known = [server.name for server in servers]
    if unknown := set(names or ()) - set(known):
        raise ValueError(f"no server is called {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    wanted = [server for server in servers if names is None or server.name in names]
    skipped = {s.name: f"{', '.join(map(str, s.absent))} not found" for s in wanted if s.absent}
    return [server for server in wanted if not server.absent], skipped


def _loads(text: str) -> list[str]:
    kinds = text.split(",")
    if unknown := [kind for kind in kinds if kind not in CONCURRENCY]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: no such load; there are {', '.join(CONCURRENCY)}")
    return kinds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, metavar="DIR", help="folder of the peers (without it pagedd runs alone)")
    parser.add_argument("--model", default="default", help="that pagedd serves (default: the default model)")
    parser.add_argument("--pagedd-flags", default="", metavar="FLAGS", help="more flags of the daemon, in one argument")
    parser.add_argument("--servers", type=lambda text: text.split(","), help="only these, separated by commas")
    parser.add_argument("--loads", type=_loads, default=list(CONCURRENCY), help="only these, separated by commas")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each server (default %(default)s)")
    parser.add_argument("-n", type=int, help="requests of each load; by default as many as the load's usual")
    parser.add_argument("--seed", type=int, default=7, help="of the first round's prompts (default %(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the line of JSON there")
    args = parser.parse_args()
    args.num_requests = {kind: args.n or DEFAULT_COUNTS[kind] for kind in CONCURRENCY}

    weights = pull_model(args.model, report=print)
    peers = peer_servers(args.peers.absolute()) if args.peers else []
    try:
        servers, skipped = choose_servers(
            [pagedd_server(weights, shlex.split(args.pagedd_flags)), *peers], args.servers
        )
    except ValueError as error:
        parser.error(str(error))
    for name, reason in skipped.items():
        print(f"{name} is skipped: {reason}", flush=True)
    if not servers:
        parser.error("no server is left to measure")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through `finally`, so that no server stays behind
    turns, failures = asyncio.run(run_rounds(servers, args))
    if not turns:
        sys.exit("no server completed a turn")
    rows, figures = summarize(turns, args.loads)
    settings = {"model": weights.name, "pagedd_flags": args.pagedd_flags, "rounds": args.rounds, "seed": args.seed}
    settings |= {"num_requests": {kind: args.num_requests[kind] for kind in args.loads}}
    print_report("serving", rows, settings | figures | {"skipped": skipped, "failed": failures}, output=args.output)


if __name__ == "__main__":
    main()
