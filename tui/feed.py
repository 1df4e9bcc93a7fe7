"""Where frames and answers come from: a daemon here, a file in `recording.py`, the same to whoever shows them.

Owns subscribing, trying again ever more slowly once the daemon is gone, and giving way: while all cores of the machine
are busy, frames are taken so seldom that they cost next to nothing, for the picture is drawn at the expense of what it
shows. A lower scheduling priority would not do: where it counts against other sessions at all, it delays the keys too.
A recording has every frame, however busy the machine is. Knows `pagedd.client` and no screen.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from pagedd.client.aio import AsyncClient
from pagedd.client.endpoints import client_endpoints
from pagedd.client.errors import PageddError
from pagedd.client.protocol import BlockDetail, Evicted, Prefixes, RequestText
from pagedd.client.stats_frame import StatsFrame
from pagedd.tui.state import Link

FIRST_RETRY_S = 0.5
LAST_RETRY_S = 5.0
_RETRY_GROWTH = 1.6
# So that viewers that lost a daemon together do not all come back at the same instant.
_RETRY_JITTER = 0.2
# All cores together; a frame that says more is followed by a rest. What came meanwhile is dropped, but for the newest.
CROWDED_PERCENT = 90.0
REST_S = 0.9
# So that three viewers of one machine slow what they look at by less than a hundredth.
CROWDED_SHARE = 0.002
LONGEST_REST_S = 4.0
PREFIX_LIMIT = 1000

Update = StatsFrame | Link


class Source(Protocol):
    """Frames as they come, answers when asked. Every refusal is a `PageddError`.

    Attributes:
        name: shown beside the link's state; "" for a live daemon.
        gives_every_frame: also those that there is no time to draw; set while they are recorded.
        pace: how long whoever draws rests; kept by the source, but while it gives every frame.
    """

    name: str
    gives_every_frame: bool
    pace: "Pace"

    @property
    def place(self) -> str:
        """Where a daemon is looked for; "" for what is no daemon."""
        ...

    def updates(self) -> AsyncIterator[Update]:
        """Frames, and a `Link` whenever there are none for a reason. Ends only when there will be no more."""
        ...

    async def previews(self) -> dict[str, str]:
        """The first words of each live request whose text this user may see, by request_id."""
        ...

    async def block(self, index: int) -> BlockDetail: ...
    async def prefixes(self) -> Prefixes: ...
    async def text(self, request_id: str) -> RequestText: ...
    async def cancel(self, request_id: str) -> None: ...
    async def set_priority(self, request_id: str, priority: int) -> None: ...
    async def evict_prefix(self, digest: str) -> Evicted: ...
    async def close(self) -> None: ...


class Pace:
    """How long to rest after a frame, so that on a crowded machine this process takes `CROWDED_SHARE` of one core.

    Args:
        cpu_clock: seconds of processor that this process has used.
    """

    def __init__(self, cpu_clock: Callable[[], float] = time.process_time) -> None:
        self._cpu_clock = cpu_clock
        self._last_s: float | None = None

    def rest_s(self, frame: StatsFrame) -> float:
        """To be called once `frame` is drawn: the rest makes up for all that was used since the last call."""
        now_s = self._cpu_clock()
        # Starting has cost much, and is over.
        used_s, self._last_s = now_s - (now_s if self._last_s is None else self._last_s), now_s
        return min(LONGEST_REST_S, max(REST_S, used_s / CROWDED_SHARE)) if is_crowded(frame) else 0.0


class LiveFeed:
    """The daemon of this machine."""

    name = ""

    def __init__(self, runtime_dir: str | None = None) -> None:
        self.gives_every_frame = False
        self.pace = Pace()
        self._runtime_dir = runtime_dir
        self._client = AsyncClient(runtime_dir, timeout_s=5.0)

    @property
    def place(self) -> str:
        try:
            return str(client_endpoints(self._runtime_dir).stats)
        except PageddError:
            # Why there can be none comes with the link's state.
            return str(self._runtime_dir)

    async def updates(self) -> AsyncIterator[Update]:
        delay_s = FIRST_RETRY_S
        while True:
            every = self.gives_every_frame
            try:
                async with contextlib.aclosing(self._client.watch_stats(every=every)) as frames:
                    async for frame in frames:
                        delay_s = FIRST_RETRY_S
                        yield frame
                        if every != self.gives_every_frame:
                            break
                        if not every and (rest_s := self.pace.rest_s(frame)):
                            await asyncio.sleep(rest_s)
            except PageddError as error:
                wait_s = delay_s * random.uniform(1 - _RETRY_JITTER, 1 + _RETRY_JITTER)
                yield Link("lost", error.message, wait_s)
                await asyncio.sleep(wait_s)
                delay_s = min(LAST_RETRY_S, delay_s * _RETRY_GROWTH)

    async def previews(self) -> dict[str, str]:
        frame = await self._client.stats()
        return {row.request_id: row.preview for row in frame.requests}

    async def block(self, index: int) -> BlockDetail:
        return await self._client.block(index)

    async def prefixes(self) -> Prefixes:
        return await self._client.prefixes(limit=PREFIX_LIMIT)

    async def text(self, request_id: str) -> RequestText:
        return await self._client.text(request_id)

    async def cancel(self, request_id: str) -> None:
        await self._client.cancel(request_id)

    async def set_priority(self, request_id: str, priority: int) -> None:
        await self._client.set_priority(request_id, priority)

    async def evict_prefix(self, digest: str) -> Evicted:
        return await self._client.evict_prefix(digest)

    async def close(self) -> None:
        await self._client.close()


def is_crowded(frame: StatsFrame) -> bool:
    """Whether whoever draws this frame takes the processor from somebody. Not known is no."""
    machine = frame.machine
    return machine is not None and machine.cpu_percent is not None and machine.cpu_percent >= CROWDED_PERCENT
