"""Draws the README's pictures of pagetop, from its demo with a clock that stands still.

python -P scripts/screenshots.py docs
"""

import argparse
import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from pagedd.client.stats_frame import StatsFrame
from pagedd.tui.feed import Update
from pagedd.tui.glyphs import UNICODE
from pagedd.tui.pagetop import Pagetop
from pagedd.tui.recording import DEMO, Replay, read
from pagedd.tui.session import Session

# By name: the size in cells, and the keys that lead there.
PICTURES = {
    "pagetop-overview": ((126, 31), ("down", "down")),
    "pagetop-blocks": ((126, 17), ("2", "tab", "down")),
}
_UNTIL_S = 14.1
_SETTLE_S = 0.4


class _DemoAtOnce(Replay):
    """The demo's first seconds without waiting for them; then nothing more."""

    async def updates(self) -> AsyncIterator[Update]:
        for record in read(DEMO):
            if record.at_s > _UNTIL_S:
                break
            if isinstance(record.message, StatsFrame):
                yield record.message
            else:
                self.learn(record.message)
        await asyncio.Event().wait()


async def draw(size: tuple[int, int], keys: tuple[str, ...]) -> str:
    """The screen after these keys, as SVG."""
    app = Pagetop(Session(_DemoAtOnce(DEMO, name=""), clock=lambda: 0.0), theme="dark", glyphs=UNICODE)
    async with app.run_test(size=size) as pilot:
        await pilot.pause(_SETTLE_S)
        for key in keys:
            await pilot.press(key)
            await pilot.pause(_SETTLE_S)
        return app.export_screenshot()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    for name, (size, keys) in PICTURES.items():
        (folder / f"{name}.svg").write_text(asyncio.run(draw(size, keys)))


if __name__ == "__main__":
    main()
