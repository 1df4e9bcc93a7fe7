"""The memory that ZeroMQ's peers may fill: libzmq keeps the parts of a message until the last has come.

It bounds a part, and the messages that it reads ahead, but not the parts of a message, and shows them to nobody before
the last one: a peer that never sends it fills the memory. So this process's own is watched. When it is too much, the
connections that bytes still come from are ended, which frees what they have sent, and if that was not enough, all.
"""

import asyncio
import logging
import resource
from collections.abc import Sequence
from pathlib import Path

from pagedd.daemon.zmq_connections import ConnectionMonitor
from pagedd.engine.freed_memory import return_freed_memory

log = logging.getLogger(__name__)

# The front holds a tenth of that: a tokenizer, and the requests under way.
MAX_BYTES = 2 << 30
# Bytes come at about 1 GB/s.
_TICK_S = 0.25
# libzmq frees in a thread of its own.
_FREED_WITHIN_S = 1.0


class MemoryWatch:
    """Watches for the sockets of `monitors`. One event loop."""

    def __init__(self, monitors: Sequence[ConnectionMonitor]) -> None:
        self._monitors = monitors
        self._limit_bytes = MAX_BYTES

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(_TICK_S)
            if resident_bytes() <= self._limit_bytes:
                continue
            for only_senders in (True, False):
                await self._end_connections(only_senders=only_senders)
                if resident_bytes() <= self._limit_bytes:
                    break
            else:
                # Whatever holds it is not theirs, and they shall not be ended again for it.
                held_bytes, self._limit_bytes = resident_bytes(), resident_bytes() + MAX_BYTES
                log.error("%d bytes of memory are held without any ZeroMQ connection", held_bytes)

    async def _end_connections(self, *, only_senders: bool) -> None:
        held_bytes = resident_bytes()
        ended = [caller for monitor in self._monitors for caller in monitor.end(only_senders=only_senders)]
        log.error(
            "the front holds %d bytes, limit %d; %d ZeroMQ connections%s are closed, of: %s",
            held_bytes,
            self._limit_bytes,
            len(ended),
            " that send" if only_senders else "",
            ", ".join(sorted({caller.name for caller in ended})) or "nobody",
        )
        await asyncio.sleep(_FREED_WITHIN_S)
        return_freed_memory()


def resident_bytes() -> int:
    """Of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
