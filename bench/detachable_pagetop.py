"""A real pagetop that lets go of its daemon when it is told to, and takes it up again: for `bench/watching.py`.

SIGUSR1 ends its subscription and then stops the process, as if it were not there; SIGCONT has it subscribe anew. All
else is the program that people run.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator

from pagedd.tui.feed import LiveFeed, Update
from pagedd.tui.glyphs import UNICODE
from pagedd.tui.pagetop import Pagetop
from pagedd.tui.session import Session

# Until the daemon has heard that nobody subscribes any more.
_FAREWELL_S = 0.1


class DetachableFeed(LiveFeed):
    """A daemon that is let go of at a signal."""

    async def updates(self) -> AsyncIterator[Update]:
        is_told = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, is_told.set)
        while True:
            updates, told = super().updates(), asyncio.ensure_future(is_told.wait())
            while True:
                update = asyncio.ensure_future(anext(updates))
                await asyncio.wait([update, told], return_when=asyncio.FIRST_COMPLETED)
                if told.done():
                    break
                yield update.result()
            update.cancel()
            await asyncio.gather(update, return_exceptions=True)
            await updates.aclose()  # type: ignore[attr-defined]
            await asyncio.sleep(_FAREWELL_S)
            is_told.clear()
            os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    Pagetop(Session(DetachableFeed(sys.argv[1])), theme="dark", glyphs=UNICODE).run()
