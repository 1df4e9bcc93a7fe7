"""The prefix cache as a tree: what is kept, who may use it, how often it was; and evicting a part of it."""

from collections.abc import Iterable
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.widget import Widget

from pagedd.client.errors import PageddError
from pagedd.client.questions import Prefixes as PrefixesAnswer
from pagedd.tui.line import Line, cut, printable
from pagedd.tui.renderables import numbers
from pagedd.tui.renderables.footer import Hint
from pagedd.tui.renderables.prefixes import (
    Branch,
    branches,
    evict_lines,
    evict_question,
    evicted_words,
    prefix_header,
    prefix_line,
)
from pagedd.tui.screens.confirm import Confirm
from pagedd.tui.screens.polling import Polling
from pagedd.tui.screens.view import HELP, NAVIGATION, QUIT, View
from pagedd.tui.widgets.list_pane import ListPane
from pagedd.tui.widgets.pane import Pane

ASK_INTERVAL_S = 2.0


class Prefixes(View):
    HINTS: ClassVar[list[Hint]] = [*NAVIGATION, Hint("⏎", "fold", "enter"), Hint("e", "evict", "e"), HELP, QUIT]
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("e", "evict", "Evict", show=False),
        Binding("space", "fold_branch", "Fold", show=False),
        Binding("k", "up", show=False),
    ]
    DEFAULT_CSS = "Prefixes #share { height: 1; padding: 0 2; }"
    AUTO_FOCUS = "ListPane"

    def __init__(self) -> None:
        super().__init__()
        self._answer: PrefixesAnswer | None = None
        self._error = ""
        self._folded: set[str] = set()
        self._polling = Polling(ASK_INTERVAL_S, self._take)

    def body(self) -> Iterable[Widget]:
        yield Pane(id="share")
        yield ListPane[Branch](lambda branch: branch.node.digest, self._line, classes="framed")

    def on_mount(self) -> None:
        self._tree.title("Cached prefixes")

    def on_unmount(self) -> None:
        self._polling.stop()

    def draw(self) -> None:
        if self._has_cache:
            self._polling.tick(self.session)
        else:
            self._answer, self._error = None, ""
        share = self.query_one("#share", Pane)
        share.show([cut(self._share(), share.size.width)])
        nodes = [] if self._answer is None else self._answer.nodes
        self._tree.show_items(branches(nodes, self._folded, self.glyphs), [prefix_header(self._tree.size.width)])

    def on_list_pane_opened(self) -> None:
        self.action_fold_branch()

    def action_up(self) -> None:
        self._tree.action_move(-1)

    def action_fold_branch(self) -> None:
        branch = self._tree.current
        if branch is not None and branch.has_children:
            self._folded ^= {branch.node.digest}
            self.draw()

    def action_evict(self) -> None:
        branch = self._tree.current
        if branch is None or not self.is_active:  # asked already: keys may come in faster
            return
        digest, source = branch.node.digest, self.session.source

        async def evict() -> str:
            answer = await source.evict_prefix(digest)
            self._polling.hurry()
            return evicted_words(answer.num_blocks, answer.num_kept, answer.num_left_on_disk)

        def answered(is_sure: bool | int | None) -> None:
            if is_sure:
                self.watching.act(evict)

        self.app.push_screen(Confirm(evict_question(branch), evict_lines(branch, self.glyphs), "evict"), answered)

    @property
    def _tree(self) -> ListPane[Branch]:
        return self.query_one(ListPane)

    @property
    def _has_cache(self) -> bool:
        """Not without an engine; while one is in a long step its cache is what it was."""
        frame = self.state.frame
        return frame is None or frame.blocks is not None or self.state.is_held

    async def _take(self) -> None:
        try:
            self._answer, self._error = await self.session.prefixes(), ""
        except PageddError as error:
            self._error = error.message
        if self.is_current:
            self.draw()

    def _share(self) -> Line:
        if not self._has_cache and self.state.frame is not None:
            return [(f"{printable(self.state.frame.state)}: nothing is cached", "dim")]
        if self._answer is None:
            return [(self._error or "asking the daemon", "warn" if self._error else "dim")]
        num_blocks, total = self._answer.num_blocks, self.state.figure("num_blocks")
        share = num_blocks / total if total else None
        line = [
            (numbers.percent(share, self.glyphs.missing).strip(), "strong"),
            (" of the pool: ", "dim"),
            (numbers.count(num_blocks, 0), "strong"),
            (" blocks hold indexed prefixes", "dim"),
        ]
        if self._answer.is_cut:
            line.append((f"; the {len(self._answer.nodes)} used most recently are shown", "dim"))
        if self._error:
            line.append((f"; {self._error}", "warn"))
        return line

    def _line(self, branch: Branch, width: int) -> Line:
        return prefix_line(branch, int(self.state.figure("num_blocks") or 0), width, self.glyphs)
