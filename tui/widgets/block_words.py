"""What is known of a cell of the map, in a line; of a single block the daemon is asked for what the frame lacks."""

import asyncio

from pagedd.client.errors import PageddError
from pagedd.client.questions import BlockDetail
from pagedd.tui.line import width_of
from pagedd.tui.renderables.block_line import block_line, block_text, run_line
from pagedd.tui.session import Session
from pagedd.tui.widgets.block_map import BlockMap
from pagedd.tui.widgets.pane import Pane

# A mouse passes over many blocks; only where it stays is asked about.
_REST_S = 0.15
# Times the frames' interval: a daemon that is too busy for pictures is too busy for questions.
_ASK_AGAIN_FRAMES = 4
_GAP = "   "


class BlockWords(Pane):
    """`show_block` says what the frame knows at once, and the rest as soon as it is there."""

    DEFAULT_CSS = "BlockWords { height: 1; }"

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._block: int | None = None
        self._detail: BlockDetail | None = None
        self._asked_s = 0.0
        self._asking: asyncio.Task[None] | None = None

    def show_block(self, session: Session, block_map: BlockMap) -> None:
        blocks = block_map.pointed_blocks
        if len(blocks) > 1:
            self._forget_block()
            self.show([run_line(session.state, blocks, self.size.width, self.look.glyphs)])
            return
        block = block_map.pointed
        if block != self._block:
            self._forget_block()
            self._block = block
        if block >= session.state.pool.num_blocks:
            self.show([])
            return
        self._draw(session)
        now_s, frame = session.clock(), session.state.frame
        ask_again_s = _ASK_AGAIN_FRAMES * frame.interval_s if frame is not None else 0.0
        is_asking = self._asking is not None and not self._asking.done()
        if not is_asking and now_s - self._asked_s >= ask_again_s and not session.is_stale and not session.is_paused:
            self._asked_s = now_s
            self._asking = asyncio.ensure_future(self._ask(session, block))

    def on_unmount(self) -> None:
        self._forget_block()

    def _forget_block(self) -> None:
        self._block, self._detail, self._asked_s = None, None, 0.0
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None

    async def _ask(self, session: Session, block: int) -> None:
        await asyncio.sleep(_REST_S)
        try:
            self._detail = await session.block(block)
        except PageddError:
            # An older daemon, or one that is just going: the frame's own words are enough.
            self._detail = None
        if self.is_mounted and self._block == block:
            self._draw(session)

    def _draw(self, session: Session) -> None:
        assert self._block is not None
        glyphs, width = self.look.glyphs, self.size.width
        line = block_line(session.state, self._block, self._detail, width, glyphs)
        if self.size.height > 1:
            self.show([line, block_text(self._detail, width, glyphs)])
            return
        text = block_text(self._detail, width - width_of(line) - len(_GAP), glyphs)
        self.show([[*line, (_GAP, ""), *text] if text else line])
