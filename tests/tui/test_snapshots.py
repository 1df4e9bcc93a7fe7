"""Pictures of every screen, from the recording that pagetop ships, with a clock that stands still.

After a change that is meant: look at `pytest tests/tui/test_snapshots.py --snapshot-update`, and at what it changed.
"""

from collections.abc import Callable

import pytest
from textual.pilot import Pilot

from .conftest import FrozenReplay, make_app, settled

SCREENS = {
    "overview": (),
    "blocks": ("2", "j", "j", "l", "l"),
    "requests": ("3", "down"),
    "request": ("3", "enter"),
    "prefixes": ("4",),
    "events": ("5",),
    "help": ("question_mark",),
}


@pytest.mark.usefixtures("utc")
@pytest.mark.parametrize("theme", ["dark", "light"])
@pytest.mark.parametrize("size", [(160, 48), (80, 24)], ids=["160x48", "80x24"])
@pytest.mark.parametrize("name", SCREENS)
def test_the_screen_looks_as_it_did(
    name: str, size: tuple[int, int], theme: str, snap_compare: Callable[..., bool]
) -> None:
    async def before(pilot: "Pilot[None]") -> None:
        await settled(pilot)
        for key in SCREENS[name]:
            await pilot.press(key)
            await settled(pilot)
        # What is asked of the source after a moment.
        await pilot.pause(0.3)
        await settled(pilot)

    assert snap_compare(make_app(FrozenReplay(), theme=theme), terminal_size=size, run_before=before)
