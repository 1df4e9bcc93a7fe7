"""Where frames and answers come from: a daemon here, a file in `recording.py`, the same to whoever shows them.

Owns subscribing, and trying again ever more slowly once the daemon is gone. How often there is a frame is the daemon's
choice (`daemon/stats_feed.py`), which knows when it is drawn at the expense of what it shows. Knows `pagedd.client` and
no screen.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Protocol

from pagedd.client.aio import AsyncClient
from pagedd.client.endpoints import client_endpoints
from pagedd.client.errors import PageddError
from pagedd.client.questions import BlockDetail, Evicted, Prefixes, RequestText
from pagedd.client.stats_frame import StatsFrame
from pagedd.tui.state import Link

FIRST_RETRY_S = 0.5
LAST_RETRY_S = 5.0
_RETRY_GROWTH = 1.6
# So that viewers that lost a daemon together do not all come back at the same instant.
_RETRY_JITTER = 0.2
PREFIX_LIMIT = 1000

Update = StatsFrame | Link


class Source(Protocol):
    """Frames as they come, answers when asked. Every refusal is a `PageddError`.

    Attributes:
        name: shown beside the link's state; "" for a live daemon.
        gives_every_frame: also those that there is no time to draw; set while they are recorded.
    """

    name: str
    gives_every_frame: bool

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


class LiveFeed:
    """The daemon of this machine."""

    name = ""

    def __init__(self, runtime_dir: str | None = None) -> None:
        self.gives_every_frame = False
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
            except PageddError as error:
                wait_s = delay_s * random.uniform(1 - _RETRY_JITTER, 1 + _RETRY_JITTER)
                yield Link("lost", error.message, wait_s)
                await asyncio.sleep(wait_s)
                delay_s = min(LAST_RETRY_S, delay_s * _RETRY_GROWTH)

    async def previews(self) -> dict[str, str]:
        return await self._client.previews()

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
