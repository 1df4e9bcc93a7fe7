"""Half an hour of random clients and faults against a real daemon, and what has to be as before after it.

    python -P -m pagedd.bench.soak --seconds 1800 --model NAME

Fails (status 1) with a sentence for each thing that is wrong: a request with no end or with two, an answer that no
fault explains, a drift in the blocks' bookkeeping, memory, descriptors or threads that did not come back, a line in the
log that nothing explains. The same `--seed` draws the same clients and faults.
"""

import argparse
import asyncio
import secrets
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from pagedd.bench.daemon_process import RunningDaemon, free_port, running_daemon
from pagedd.bench.report import print_report
from pagedd.bench.soak.faults import Faults
from pagedd.bench.soak.held import Held
from pagedd.bench.soak.http_client import HttpClient, HttpDoor
from pagedd.bench.soak.ledger import Ledger
from pagedd.bench.soak.log_lines import unexplained
from pagedd.bench.soak.small_disk import SmallDisk
from pagedd.bench.soak.zmq_client import ZmqClient
from pagedd.client.aio import AsyncClient
from pagedd.client.endpoints import Endpoints
from pagedd.client.errors import PageddError
from pagedd.daemon.api_keys import hash_line

STEP_TIMEOUT_S = 10
FLAGS = (
    *("--num-blocks", "96", "--max-model-len", "512", "--max-num-seqs", "8", "--max-queued-requests", "16"),
    *("--kv-host-gib", "0.01", "--kv-disk-gib", "0.03", "--kv-quality-check", "off"),
    *("--step-timeout-seconds", str(STEP_TIMEOUT_S), "--drain-seconds", "1", "--log-format", "human"),
)
DISK_BYTES = 64 << 20
WARM_UP_S = 5.0
BACK_WITHIN_S = 90.0


class Soak:
    """One daemon, its clients and its faults.

    Attributes:
        ledger: what came of it.
        before, after: what the daemon held before the faults and after them.
    """

    def __init__(self, folder: Path, seed: int, interval_s: float) -> None:
        """`folder` is empty, and stays after the soak; `interval_s` is the mean time between two faults."""
        self.ledger = Ledger()
        self.before: Held | None = None
        self.after: Held | None = None
        self._seed = seed
        self._interval_s = interval_s
        self._folder = folder
        self._tcp = HttpDoor(port=free_port(), key=secrets.token_hex(24))
        disk = SmallDisk(folder / "state", DISK_BYTES)
        disk.folder.mkdir()
        self._disk = disk if disk.is_possible else None

    async def run(self, flags: list[str], seconds: float) -> None:
        """Raises `RuntimeError` when no daemon comes up."""
        under = self._disk.command if self._disk is not None else ()
        environ = {"XDG_STATE_HOME": str(self._folder / "state")}
        async with running_daemon([*FLAGS, *self._own_flags(), *flags], under=under, environ=environ) as daemon:
            endpoints = Endpoints(daemon.http_socket.parent)
            await self._clients_for(WARM_UP_S, endpoints, self._seed)
            self.before = await self._held_when_idle(daemon, endpoints)

            faults = Faults(
                endpoints, daemon.pid, self.ledger, self._seed, self._interval_s, STEP_TIMEOUT_S, self._disk
            )
            await self._clients_for(seconds, endpoints, self._seed + 1, faults)
            self.after = await self._held_when_idle(daemon, endpoints)
            self.ledger.wrong += self.after.grown_beyond(self.before)
            log = daemon.http_socket.parent / "log"
            self.ledger.wrong += unexplained(log.read_text())

    def _own_flags(self) -> list[str]:
        key_file = self._folder / "keys"
        assert self._tcp.key is not None
        key_file.write_text(hash_line(self._tcp.key, "soak") + "\n")
        disk = ("--kv-disk-directory", str(self._folder / "state" / "kv"))
        return [*disk, "--http-port", str(self._tcp.port), "--api-key-file", str(key_file)]

    async def _clients_for(self, seconds: float, endpoints: Endpoints, seed: int, faults: Faults | None = None) -> None:
        """Returns when every client has heard the ends of its requests."""
        stop = asyncio.Event()
        clients: list[ZmqClient | HttpClient | Faults] = []
        for number in range(4):
            clients.append(ZmqClient(f"client{seed}.{number}", endpoints, self.ledger, 100 * seed + number))
            door = self._tcp if number % 2 else HttpDoor(unix_path=endpoints.http)
            clients.append(HttpClient(door, self.ledger, 100 * seed + 50 + number))
        if faults is not None:
            clients.append(faults)
        tasks = [asyncio.create_task(client.run(stop)) for client in clients]
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        stop.set()
        await asyncio.gather(*tasks)

    async def _held_when_idle(self, daemon: RunningDaemon, endpoints: Endpoints) -> Held:
        """Waits until an engine is there and holds no block for anyone."""
        async with AsyncClient(endpoints.directory) as client:
            try:
                async with asyncio.timeout(BACK_WITHIN_S):
                    while not await _answers(client):  # noqa: ASYNC110  what is waited for has no event
                        await asyncio.sleep(0.2)
                    while (figures := (await client.stats()).figures)["num_blocks_used"]:  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
            except TimeoutError:
                self.ledger.wrong.append(f"no idle engine within {BACK_WITHIN_S:g} s")
            else:
                if figures["integrity_alarms_total"]:
                    self.ledger.wrong.append(f"{figures['integrity_alarms_total']:g} alarms of the blocks' bookkeeping")
        # Connections that were closed are noticed.
        await asyncio.sleep(1)
        return Held.by(daemon.pid)


async def _answers(client: AsyncClient) -> bool:
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
    parser.add_argument("--model", help="a model's path or name")
    parser.add_argument("--output", type=Path, help="write the figures to this file as well")
    arguments = parser.parse_args(argv)
    flags = ["--model", arguments.model] if arguments.model is not None else []
    with tempfile.TemporaryDirectory(prefix="pagedd-soak-") as folder:
        soak = Soak(Path(folder), arguments.seed, arguments.interval)
        asyncio.run(soak.run(flags, arguments.seconds))
    ledger = soak.ledger
    assert soak.before is not None
    assert soak.after is not None
    before, after = asdict(soak.before), asdict(soak.after)
    print_report(
        "soak",
        [{"held": name, "before": before[name], "after": after[name]} for name in before],
        {
            "seconds": arguments.seconds,
            "seed": arguments.seed,
            "ends": dict(ledger.ends.most_common()),
            "faults": dict(ledger.faults_injected.most_common()),
            "before": before,
            "after": after,
            "wrong": ledger.wrong,
        },
        output=arguments.output,
    )
    for sentence in ledger.wrong:
        print(f"WRONG: {sentence}", file=sys.stderr)
    return 1 if ledger.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
