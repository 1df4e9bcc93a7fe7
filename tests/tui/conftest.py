"""Sources that need no daemon: generated frames, and the recording that pagetop ships, both without waiting."""

import asyncio
import resource
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from textual.events import Key
from textual.pilot import Pilot

from pagedd.bench.frames import FakeEngine
from pagedd.client.errors import PageddError
from pagedd.client.questions import BlockDetail, Evicted, Prefixes, RequestText
from pagedd.client.stats_frame import StatsFrame
from pagedd.tui.feed import Update
from pagedd.tui.glyphs import UNICODE, Glyphs
from pagedd.tui.pagetop import Pagetop
from pagedd.tui.recording import DEMO, Replay, read
from pagedd.tui.session import Session
from pagedd.tui.state import State

NOW_S = 100.0


class FakeSource:
    """Gives its updates at once and then stays, like a daemon that says nothing more.

    Attributes:
        done: what it was asked to do, in order.
        refusal: raised instead of doing anything.
    """

    name = ""
    place = "/run/pagedd/stats.sock"

    def __init__(self, updates: Iterable[Update]) -> None:
        self.gives_every_frame = False
        self._updates = list(updates)
        self._more: asyncio.Queue[Update] | None = None
        self.done: list[tuple[object, ...]] = []
        self.refusal: PageddError | None = None

    async def updates(self) -> AsyncIterator[Update]:
        self._more = asyncio.Queue()
        for update in self._updates:
            yield update
        while True:
            yield await self._more.get()

    def say(self, update: Update) -> None:
        assert self._more is not None
        self._more.put_nowait(update)

    async def previews(self) -> dict[str, str]:
        return {}

    async def block(self, index: int) -> BlockDetail:
        return BlockDetail(id="", index=index, state="used", digest="9f3ac01b22", last_use_s=0.1, text="the quick fox")

    async def prefixes(self) -> Prefixes:
        return Prefixes(id="", nodes=FakeEngine().prefixes(), num_blocks=72)

    async def text(self, request_id: str) -> RequestText:
        return RequestText(id="", request_id=request_id, prompt="user: hello\n", outputs=["Hello yourself."])

    async def cancel(self, request_id: str) -> None:
        self._act("cancel", request_id)

    async def set_priority(self, request_id: str, priority: int) -> None:
        self._act("set_priority", request_id, priority)

    async def evict_prefix(self, digest: str) -> Evicted:
        self._act("evict_prefix", digest)
        return Evicted(id="", num_blocks=4, num_kept=1)

    async def close(self) -> None:
        pass

    def _act(self, *action: object) -> None:
        self.done.append(action)
        if self.refusal is not None:
            raise self.refusal


def make_source(num_frames: int = 40, **settings: object) -> FakeSource:
    """Frames of a fake engine with these settings."""
    engine = FakeEngine(**settings)  # type: ignore[arg-type]
    return FakeSource(engine.frame() for _ in range(num_frames))


@contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """No file can be longer meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class FrozenReplay(Replay):
    """The demo up to a moment, all at once."""

    def __init__(self, path: Path = DEMO, until_s: float = 26.4) -> None:
        super().__init__(path, name="")
        self._until_s = until_s

    async def updates(self) -> AsyncIterator[Update]:
        for record in read(self._path):
            if record.at_s > self._until_s:
                break
            if isinstance(record.message, StatsFrame):
                yield record.message
            else:
                self.learn(record.message)
        await asyncio.Event().wait()


def make_app(
    source: FakeSource | Replay,
    *,
    theme: str = "dark",
    glyphs: Glyphs = UNICODE,
    clock: Callable[[], float] | None = None,
) -> Pagetop:
    """Pagetop with a clock that stands still."""
    return Pagetop(Session(source, clock=clock or (lambda: NOW_S)), theme=theme, glyphs=glyphs)


def played(num_frames: int, **settings: object) -> State:
    """The state after so many frames of a fake engine."""
    engine, state = FakeEngine(**settings), State()  # type: ignore[arg-type]
    for _ in range(num_frames):
        state.take(engine.frame(), NOW_S)
    return state


async def settled(pilot: "Pilot[None]") -> None:
    """Waits until the source has said what it has and the picture shows it."""
    for _ in range(3):
        await pilot.pause(0.02)
    await pilot.pause()


async def press_at_once(pilot: "Pilot[None]", *keys: str) -> None:
    """As a terminal sends them: all are there before the first is heeded."""
    for key in keys:
        pilot.app.post_message(Key(key, key if len(key) == 1 else None))
    await settled(pilot)


def screen_text(app: Pagetop) -> str:
    """What is on screen, as text."""
    return "\n".join(line.text for line in app.screen._compositor.render_strips())


@pytest.fixture
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterable[None]:
    """Times of day are those of Greenwich."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()
