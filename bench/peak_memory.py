"""The most memory that a process and all below it held at once."""

import asyncio
import contextlib
from types import TracebackType

import psutil

SAMPLE_INTERVAL_S = 0.5


class PeakMemory:
    """Samples while its block runs.

    Attributes:
        peak_bytes: largest sum of resident sizes seen. A page that two processes share counts in both.
    """

    def __init__(self, pid: int, *, interval_s: float = SAMPLE_INTERVAL_S) -> None:
        self.peak_bytes = 0
        self._root = psutil.Process(pid)
        self._interval_s = interval_s
        self._sampling: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "PeakMemory":
        self._sampling = asyncio.create_task(self._sample_forever())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._sampling is not None:
            self._sampling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sampling
        self._sample()

    async def _sample_forever(self) -> None:
        while True:
            self._sample()
            await asyncio.sleep(self._interval_s)

    def _sample(self) -> None:
        self.peak_bytes = max(self.peak_bytes, tree_bytes(self._root))


def tree_bytes(root: psutil.Process) -> int:
    """Resident bytes of `root` and everything below it, now; those that end meanwhile count as none."""
    total = 0
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
    return total
