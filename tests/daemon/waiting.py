"""Waiting for what another task or process brings about, and for how long at most."""

import asyncio
from collections.abc import Callable

WAIT_S = 60.0


async def until(condition: Callable[[], bool]) -> None:
    """Waits for something that another task brings about."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110  what is waited for has no event
            await asyncio.sleep(0.005)
