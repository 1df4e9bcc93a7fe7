"""What is being watched: a source, the state that its frames make, and the recording, if one is made.

Owns pausing, recording and the first words of requests, which are asked for once each. Knows no widget: whoever draws
is called when there is something new.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from pagedd.client.errors import PageddError
from pagedd.client.questions import BlockDetail, Prefixes, RequestText
from pagedd.client.stats_frame import StatsFrame
from pagedd.tui.feed import Source, Update
from pagedd.tui.recording import PREFIXES_QUESTION, SUFFIX, Recorder, block_question, text_question
from pagedd.tui.renderables.header import Modes
from pagedd.tui.sense import nonsense
from pagedd.tui.state import Link, State

_PREVIEW_INTERVAL_S = 1.0

_Answer = TypeVar("_Answer", BlockDetail, Prefixes, RequestText)


class Session:
    """One source, watched.

    Attributes:
        state: what screens show. Another object when a replay begins anew.
    """

    def __init__(self, source: Source, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.state = State()
        self.source = source
        self.clock = clock
        self.is_paused = False
        self._recorder: Recorder | None = None
        self._fault: PageddError | None = None
        self._asked: set[str] = set()
        self._preview_task: asyncio.Task[None] | None = None
        self._next_previews_s = 0.0

    @property
    def modes(self) -> Modes:
        return Modes(self.source.name, self.is_paused, self._recorder is not None)

    @property
    def is_stale(self) -> bool:
        """What is on screen may not hold any more. A picture that is held on purpose, or recorded, has no age."""
        is_timeless = self.is_paused or bool(self.source.name)
        return self.state.is_stale(self.state.received_s if is_timeless else self.clock())

    @property
    def fresh_for_s(self) -> float:
        """For how long what is on screen has no age to show, if nothing else comes; 0 when it has one."""
        return 0.0 if self.is_paused else self.state.fresh_for_s(self.clock())

    async def watch(self, changed: Callable[[], None]) -> None:
        """Takes in what the source has until it has no more; `changed` is called when the picture is another one."""
        try:
            async for update in self.source.updates():
                if self.take(update):
                    changed()
        except PageddError as error:  # a recording that is damaged from here on
            self.state.lose(Link("ended", error.message))
            changed()

    def take(self, update: Update) -> bool:
        """Whether the picture is another one now. What is recorded does not depend on it."""
        if not isinstance(update, StatsFrame):
            if update.state == "connecting":
                self.state = State()
            self.state.lose(update)
            return True
        if (reason := nonsense(update)) is not None:
            self.state.lose(Link("lost", f"a frame that makes no sense: {reason}"))
            return True
        self._learn_previews(update)
        self.state.fill_in_previews(update)
        if self._recorder is not None:
            self._record(update)
        if self.is_paused:
            self.state.regain()
            return False
        self.state.take(update, self.clock())
        return True

    def toggle_pause(self) -> None:
        self.is_paused = not self.is_paused

    def start_recording(self, path: Path | None = None) -> Path:
        """Records from here on, by default into a file of this directory named after the time.

        Raises `PageddError("invalid_setting")` when the file exists or cannot be written.
        """
        path = path or Path(time.strftime("pagetop-%Y%m%d-%H%M%S") + SUFFIX)
        self._recorder = Recorder(path, started_s=self.clock())
        self.source.gives_every_frame = True
        if self.state.frame is not None:
            self._record(self.state.frame)
        return path

    def stop_recording(self) -> Path | None:
        """Closes the file; None when there is none.

        Raises `PageddError("invalid_setting")` when its end cannot be written.
        """
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return None
        self.source.gives_every_frame = False
        recorder.close()
        return recorder.path

    def take_fault(self) -> PageddError | None:
        """What ended the recording, for whoever tells; once."""
        fault, self._fault = self._fault, None
        return fault

    async def close(self) -> None:
        try:
            self.stop_recording()
        except PageddError as error:
            self._fault = error
        if self._preview_task is not None:
            self._preview_task.cancel()
        await self.source.close()

    async def block(self, index: int) -> BlockDetail:
        return self._kept(await self.source.block(index), block_question(index))

    async def prefixes(self) -> Prefixes:
        return self._kept(await self.source.prefixes(), PREFIXES_QUESTION)

    async def text(self, request_id: str) -> RequestText:
        return self._kept(await self.source.text(request_id), text_question(request_id))

    def _kept(self, answer: _Answer, question: str) -> _Answer:
        """Raises `PageddError("malformed_message")` for an answer that cannot be shown."""
        if (reason := nonsense(answer)) is not None:
            raise PageddError("malformed_message", f"an answer that makes no sense: {reason}")
        if self._recorder is not None:
            self._record(msgspec.structs.replace(answer, id=question))
        return answer

    def _record(self, message: StatsFrame | BlockDetail | Prefixes | RequestText) -> None:
        assert self._recorder is not None
        try:
            self._recorder.write(message, self.clock())
        except PageddError as error:
            # A full disk ends the recording; watching goes on.
            self._fault = error
            with suppress(PageddError):
                self.stop_recording()

    def _learn_previews(self, frame: StatsFrame) -> None:
        """Asks for the first words of requests that were not asked for yet, at most once a second."""
        live = {row.request_id for row in frame.requests}
        self._asked &= live
        unknown = live - self._asked
        is_asking = self._preview_task is not None and not self._preview_task.done()
        if not unknown or is_asking or self.clock() < self._next_previews_s or self.source.name:
            return
        self._next_previews_s = self.clock() + _PREVIEW_INTERVAL_S
        self._asked |= unknown
        self._preview_task = asyncio.ensure_future(self._ask_previews())

    async def _ask_previews(self) -> None:
        try:
            self.state.previews |= await self.source.previews()
            # The next frame may be seconds away.
            if self.state.frame is not None:
                self.state.fill_in_previews(self.state.frame)
        except PageddError:
            # The link's own state says so; a request without its words is still shown.
            return
