"""What goes wrong during a soak, one fault after another: engines die and hang, the disk fills, clients crowd."""

import asyncio
import os
import random
import signal
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress

import aiohttp
import psutil

from pagedd.bench.soak.held import engine_of
from pagedd.bench.soak.ledger import Ledger
from pagedd.bench.soak.small_disk import SmallDisk
from pagedd.client.aio import AsyncClient
from pagedd.client.endpoints import Endpoints
from pagedd.client.errors import PageddError

_CROWD = 60
# What a client that dies in the middle of its request leaves behind.
_HALF_A_REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"


class Faults:
    """Injects one every `interval_s` on average until told to stop. `hung_s` is the daemon's step timeout.

    `disk` is what the daemon writes to; None leaves out the fault that fills it.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        pid: int,
        ledger: Ledger,
        seed: int,
        interval_s: float,
        hung_s: float,
        disk: SmallDisk | None,
    ) -> None:
        self._endpoints = endpoints
        self._pid = pid
        self._ledger = ledger
        self._draw = random.Random(seed)
        self._interval_s = interval_s
        self._hung_s = hung_s
        self._disk = disk

    async def run(self, stop: asyncio.Event) -> None:
        faults: list[Callable[[], Awaitable[None]]] = [
            self.engine_killed,
            self.engine_pauses,
            self.engine_hangs,
            self.sleep_and_wake,
            self.queue_crowded,
            self.connections_crowd,
            self.reload,
        ]
        if self._disk is not None:
            faults.append(self.disk_full)
        # Each comes before any comes again, so that a short soak has them all.
        pending: list[Callable[[], Awaitable[None]]] = []
        while not stop.is_set():
            pending = pending or self._draw.sample(faults, len(faults))
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), self._draw.uniform(0.5, 1.5) * self._interval_s)
                return
            fault = pending.pop()
            self._ledger.faults_injected[fault.__name__] += 1
            await fault()

    async def engine_killed(self) -> None:
        self._signal_engine(signal.SIGKILL)

    async def engine_pauses(self) -> None:
        """Shorter than a hang; the step goes on where it was."""
        self._signal_engine(signal.SIGSTOP)
        await asyncio.sleep(self._hung_s / 2)
        self._signal_engine(signal.SIGCONT)

    async def engine_hangs(self) -> None:
        """The daemon has to end it, unless it was loading, which has a limit of its own: then it goes on."""
        self._signal_engine(signal.SIGSTOP)
        await asyncio.sleep(1.5 * self._hung_s)
        self._signal_engine(signal.SIGCONT)

    async def sleep_and_wake(self) -> None:
        async with AsyncClient(self._endpoints.directory) as client:
            try:
                await client.sleep()
                await asyncio.sleep(self._draw.uniform(0, 1))
                await client.wake()
            except PageddError as error:
                # There may be no engine that could sleep.
                if not error.code.startswith("engine_"):
                    self._ledger.wrong.append(f"sleep: {error}")

    async def queue_crowded(self) -> None:
        """More requests at once than may wait."""
        connector = aiohttp.UnixConnector(str(self._endpoints.http), limit=0)
        body = {"prompt": "Once", "max_tokens": 4}

        async def ask(http: aiohttp.ClientSession, number: int) -> None:
            async with http.post(
                "/v1/completions", json=body | {"prompt": f"{number} {self._draw.random()}"}
            ) as response:
                answer = await response.json()
                if "error" in answer:
                    self._ledger.failed(answer["error"]["code"], answer["error"]["message"])
                else:
                    self._ledger.finished("length")

        async with aiohttp.ClientSession("http://localhost", connector=connector) as http:
            await asyncio.gather(*(ask(http, number) for number in range(_CROWD)))

    async def connections_crowd(self) -> None:
        """Connections to each socket that say nothing, half of a request, or what is no protocol of ours."""
        crowd = []
        for path in (self._endpoints.requests, self._endpoints.http, self._endpoints.stats):
            for _ in range(_CROWD // 3):
                connection = socket.socket(socket.AF_UNIX)
                connection.settimeout(5)
                connection.connect(str(path))
                connection.sendall(self._draw.choice((b"", _HALF_A_REQUEST, self._draw.randbytes(200))))
                crowd.append(connection)
        await asyncio.sleep(0.5)
        for connection in crowd:
            connection.close()

    async def reload(self) -> None:
        os.kill(self._pid, signal.SIGHUP)

    async def disk_full(self) -> None:
        """While an engine dies, whose crash report then finds no room, and the next one looks for blocks there."""
        assert self._disk is not None
        await asyncio.to_thread(self._disk.fill, self._pid)
        await asyncio.sleep(1)
        self._signal_engine(signal.SIGKILL)
        await asyncio.sleep(self._draw.uniform(1, 5))
        self._disk.empty(self._pid)

    def _signal_engine(self, number: signal.Signals) -> None:
        engine = engine_of(self._pid)
        if engine is not None:
            with suppress(psutil.NoSuchProcess):
                engine.send_signal(number)
