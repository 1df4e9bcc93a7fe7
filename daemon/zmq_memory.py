"""The memory that ZeroMQ's peers may fill: libzmq keeps the parts of a message until the last has come.

It bounds a part, and the messages that it reads ahead, but not the parts of a message, and shows them to nobody before
the last one: a peer that never sends it fills the memory. So this process's own is watched. When it is too much, the
connections that bytes still come from are ended, which frees what they have sent, and if that was not enough, all.
"""

import asyncio
import logging
from collections.abc import Sequence

import psutil

from pagedd.daemon.caller import Caller
from pagedd.daemon.zmq_connections import ConnectionMonitor
from pagedd.engine.freed_memory import return_freed_memory

log = logging.getLogger(__name__)

# The front holds a tenth of that: a tokenizer, and the requests under way.
MAX_BYTES = 2 << 30
# Bytes come at about 1 GB/s.
_TICK_S = 0.25
_NUM_LOOKS, _LOOK_S = 20, 0.01
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
            self._tell("that send", await self._end_senders())
            await _let_go()
            if resident_bytes() <= self._limit_bytes:
                continue
            self._tell("of all", [caller for monitor in self._monitors for caller in monitor.end_all()])
            await _let_go()
            if (held_bytes := resident_bytes()) > self._limit_bytes:
                # Whatever holds it is not theirs, and they shall not be ended again for it.
                self._limit_bytes = held_bytes + MAX_BYTES
                log.error("%d bytes of memory are held without any ZeroMQ connection", held_bytes)

    async def _end_senders(self) -> list[Caller]:
        # Looked for again and again: whoever sends has at some moment been read to the end.
        senders: list[set[int]] = [set() for _ in self._monitors]
        for _ in range(_NUM_LOOKS):
            for found, monitor in zip(senders, self._monitors, strict=True):
                found |= monitor.sending()
            await asyncio.sleep(_LOOK_S)
        return [caller for found, monitor in zip(senders, self._monitors, strict=True) for caller in monitor.end(found)]

    def _tell(self, which: str, ended: list[Caller]) -> None:
        log.error(
            "the front holds over %d bytes; %d ZeroMQ connections %s are closed, of: %s",
            self._limit_bytes,
            len(ended),
            which,
            ", ".join(sorted({caller.name for caller in ended})) or "nobody",
        )


async def _let_go() -> None:
    """Waits until libzmq has freed what the connections had sent, and gives it back."""
    await asyncio.sleep(_FREED_WITHIN_S)
    return_freed_memory()


def resident_bytes() -> int:
    """Of this process."""
    return int(psutil.Process().memory_info().rss)
