"""Half an hour of random clients and faults against a real daemon, and what has to be as before after it.

    python -P -m pagedd.bench.soak --seconds 1800 --model NAME

Fails (status 1) with a sentence for each thing that is wrong: a request with no end or with two, an answer that no
fault explains, a drift in the blocks' bookkeeping, memory, descriptors or threads that did not come back, a line in the
log that nothing explains. The same `--seed` draws the same clients and faults.
"""

import argparse
import asyncio
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

from pagedd.bench.daemon_process import RunningDaemon, running_daemon
from pagedd.bench.soak.faults import Faults, engine_of
from pagedd.bench.soak.http_client import HttpClient
from pagedd.bench.soak.ledger import Ledger
from pagedd.bench.soak.log_lines import unexplained
from pagedd.bench.soak.zmq_client import ZmqClient
from pagedd.client.aio import AsyncClient
from pagedd.client.endpoints import Endpoints
from pagedd.client.errors import PageddError

STEP_TIMEOUT_S = 10
FLAGS = (
    *("--num-blocks", "96", "--max-model-len", "512", "--max-num-seqs", "8", "--max-queued-requests", "16"),
    *("--step-timeout-seconds", str(STEP_TIMEOUT_S), "--drain-seconds", "1", "--log-format", "human"),
)
WARM_UP_S = 5.0
BACK_WITHIN_S = 90.0
# What allocators keep, and a thread pool that has grown to its bound.
MEMORY_SLACK_BYTES = 48 << 20
THREADS_SLACK = 32


@dataclass(frozen=True, slots=True)
class Held:
    """What the front and its engine hold while nothing is asked of them."""

    rss_bytes: int
    num_descriptors: int
    num_threads: int
    num_children: int
    engine_rss_bytes: int
    engine_descriptors: int

    @classmethod
    def by(cls, pid: int) -> "Held":
        front, engine = psutil.Process(pid), engine_of(pid)
        if engine is None:
            raise RuntimeError("there is no engine process")
        return cls(
            front.memory_info().rss,
            front.num_fds(),
            front.num_threads(),
            len(front.children(recursive=True)),
            engine.memory_info().rss,
            engine.num_fds(),
        )

    def grown_beyond(self, before: "Held") -> list[str]:
        """What is held now and was not before, in sentences."""
        grown = []
        for name, slack in (
            ("rss_bytes", MEMORY_SLACK_BYTES),
            ("num_descriptors", 0),
            ("num_threads", THREADS_SLACK),
            ("num_children", 0),
            ("engine_rss_bytes", MEMORY_SLACK_BYTES),
            ("engine_descriptors", 0),
        ):
            now, then = getattr(self, name), getattr(before, name)
            if now > then + slack:
                grown.append(f"{name}: {then} before, {now} after, {slack} allowed")
        return grown


async def soak(flags: list[str], seconds: float, seed: int, interval_s: float) -> Ledger:
    """Runs it all; what is wrong is in the ledger's `wrong`. Raises `RuntimeError` when no daemon comes up."""
    ledger = Ledger()
    with tempfile.TemporaryDirectory(prefix="pagedd-soak-") as state:
        os.environ["XDG_STATE_HOME"] = state
        async with running_daemon([*FLAGS, *flags]) as daemon:
            endpoints = Endpoints(daemon.http_socket.parent)
            await clients_for(WARM_UP_S, endpoints, ledger, seed)
            before = await held_when_idle(daemon, endpoints, ledger)

            faults = Faults(endpoints, daemon.pid, ledger, seed, interval_s, STEP_TIMEOUT_S)
            await clients_for(seconds, endpoints, ledger, seed + 1, faults)
            after = await held_when_idle(daemon, endpoints, ledger)
            ledger.wrong += after.grown_beyond(before)
            log = daemon.http_socket.parent / "log"
            ledger.wrong += unexplained(log.read_text())
            print(f"before: {before}\nafter:  {after}")
    return ledger


async def clients_for(
    seconds: float, endpoints: Endpoints, ledger: Ledger, seed: int, faults: Faults | None = None
) -> None:
    """Returns when every client has heard the ends of its requests."""
    stop = asyncio.Event()
    clients: list[ZmqClient | HttpClient | Faults] = []
    for number in range(5):
        clients.append(ZmqClient(f"client{seed}.{number}", endpoints, ledger, 100 * seed + number))
        clients.append(HttpClient(endpoints, ledger, 100 * seed + 50 + number))
    if faults is not None:
        clients.append(faults)
    tasks = [asyncio.create_task(client.run(stop)) for client in clients]
    await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    stop.set()
    await asyncio.gather(*tasks)


async def held_when_idle(daemon: RunningDaemon, endpoints: Endpoints, ledger: Ledger) -> Held:
    """Waits until an engine is there and holds no block for anyone."""
    async with AsyncClient(endpoints.directory) as client:
        try:
            async with asyncio.timeout(BACK_WITHIN_S):
                while not await answers(client):  # noqa: ASYNC110  what is waited for has no event
                    await asyncio.sleep(0.2)
                while (figures := (await client.stats()).figures)["num_blocks_used"]:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        except TimeoutError:
            ledger.wrong.append(f"no idle engine within {BACK_WITHIN_S:g} s")
        else:
            if figures["integrity_alarms_total"]:
                ledger.wrong.append(f"{figures['integrity_alarms_total']:g} alarms of the blocks' bookkeeping")
    # Connections that were closed are noticed.
    await asyncio.sleep(1)
    return Held.by(daemon.pid)


async def answers(client: AsyncClient) -> bool:
    try:
        await client.generate("Hello", max_tokens=1)
    except PageddError:
        return False
    return True


def main(argv: list[str] | None = None) -> int:
    """Entry point; the exit status."""
    parser = argparse.ArgumentParser(prog="pagedd.bench.soak", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--interval", type=float, default=5, help="seconds between two faults, on average")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", type=Path, help="a model's path or name")
    arguments = parser.parse_args(argv)
    flags = ["--model", str(arguments.model)] if arguments.model is not None else []
    ledger = asyncio.run(soak(flags, arguments.seconds, arguments.seed, arguments.interval))
    print(f"ends: {dict(ledger.ends.most_common())}\nfaults: {dict(ledger.faults_injected)}")
    for sentence in ledger.wrong:
        print(f"WRONG: {sentence}", file=sys.stderr)
    return 1 if ledger.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
