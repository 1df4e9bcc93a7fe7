"""The block map: every block of the pool as a cell, in physical order.

A row is a strip that is kept until a block in it changes. What a cell shows is `renderables/block_cells.py`'s, which
blocks changed is `pool.py`'s; this owns the cursor, what is lit, and the flash of a block that was just taken.
A run of blocks does not flash: in a large pool something is always taken, and its height says so. The end of a pool
that was never in use is a line of words; zoomed in, every block has its cell.
"""

from collections.abc import Collection
from math import ceil
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message

from pagedd.tui.pool import Pool
from pagedd.tui.renderables import numbers
from pagedd.tui.renderables.block_cells import GROUP, Cell, Grid, block_cells, blocks_in_sight, run_cell
from pagedd.tui.widgets.painted import Painted, Segments

_LIT = Style(reverse=True, bold=True)
_PARTIAL = Style(underline=True)
# In a large pool nearly every row changes with every frame, and no eye follows single blocks in it.
_FRAMES_PER_RUN_PICTURE = 2
# Runs that look alike are drawn alike; a pool has more kinds of them than anybody needs to keep.
_MAX_RUNS = 20_000

# A map of fewer rows has none to spare for what is not in it.
_LEAST_ROWS_WITH_REST = 3

_Drawn = tuple[str, Style]


class BlockMap(Painted, can_focus=True):
    """Shows a pool, as one cell a block or, when that needs more room than there is, as runs of blocks."""

    DEFAULT_CSS = "BlockMap { height: 1fr; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left,h", "move(-1, 0)", "Left", show=False),
        Binding("right,l", "move(1, 0)", "Right", show=False),
        Binding("up,k", "move(0, -1)", "Up", show=False),
        Binding("down,j", "move(0, 1)", "Down", show=False),
        Binding("pageup,ctrl+b,ctrl+u", "page(-1)", "Page up", show=False),
        Binding("pagedown,ctrl+f,ctrl+d", "page(1)", "Page down", show=False),
        Binding("home,g", "jump(False)", "First", show=False),
        Binding("end,G", "jump(True)", "Last", show=False),
        Binding("z", "zoom", "Zoom", show=False),
        Binding("enter", "open", "Open", show=False),
    ]

    class Pointed(Message):
        """The cursor or the mouse is on another block."""

    class Opened(Message):
        """Enter or a click on the block under the cursor."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.pool: Pool | None = None
        self.grid = Grid(0, GROUP, 1, 4)
        self._version = -1
        self._is_zoomed = False
        self._top = 0
        self._cursor = 0
        self._hovered: int | None = None
        self._lit: frozenset[int] = frozenset()
        self._taken: frozenset[int] = frozenset()
        self._evicted: frozenset[int] = frozenset()
        self._overlays: dict[int, str] | None = None  # what goes over a cell; None has to be made again
        self._groups: dict[int, Segments] = {}  # as they are drawn, by their number in the pool
        self._waiting: set[int] = set()  # groups to be drawn with the next picture
        self._styles: tuple[list[Cell], list[Style], list[Style]] | None = None
        self._runs: dict[bytes, _Drawn] = {}
        self._run_styles: dict[Style, Style] = {}
        self._lit_styles: dict[Style, Style] = {}

    @property
    def pointed(self) -> int:
        """The block that the mouse is on, else the cursor's."""
        return self._cursor if self._hovered is None else self._hovered

    @property
    def pointed_blocks(self) -> range:
        """All blocks of that cell."""
        start = self.pointed - self.pointed % self.grid.per_cell
        return range(start, min(self.grid.num_blocks, start + self.grid.per_cell))

    @staticmethod
    def rows_of(pool: Pool, width: int, height: int) -> int:
        """How many of at most `height` rows it takes to show the pool, as far as it was ever in use."""
        in_sight = blocks_in_sight(pool.num_blocks, pool.extent)
        has_rest = in_sight < pool.num_blocks and height >= _LEAST_ROWS_WITH_REST
        return Grid.fit(in_sight, width, height - has_rest).num_rows + has_rest

    def show(self, pool: Pool, lit: Collection[int]) -> None:
        """Draws what the pool's newest frame changed, and lights the blocks of `lit`."""
        self.pool = pool
        missed = pool.version not in (self._version, self._version + 1)
        is_same = pool.version == self._version
        self._version = pool.version
        if missed or self._fit() or (None in (pool.changed, pool.filled) and not is_same):
            self._taken = self._evicted = frozenset()
            self._lit = frozenset(lit)
            self.repaint()
            return
        changed: set[int] = set()
        if not is_same:
            changed.update(pool.changed or ())
            if self.grid.per_cell == 1:
                changed.update(pool.filled or (), pool.taken, pool.evicted, self._taken, self._evicted)
                # What was evicted looks so for a frame, then like taken for another, then like what it is now.
                self._taken, self._evicted = (pool.taken | self._evicted) - pool.evicted, pool.evicted
                changed |= self._taken
        if self._lit != (now_lit := frozenset(lit)):
            changed |= self._lit ^ now_lit
            self._lit = now_lit
        self._overlays = None
        blocks_per_group = self.grid.blocks_per_group
        self._waiting.update(block // blocks_per_group for block in changed)
        if self.grid.per_cell == 1 or is_same or pool.version % _FRAMES_PER_RUN_PICTURE == 0:
            self._forget_groups(self._waiting)
            self._waiting.clear()

    def point(self, block: int) -> None:
        """Moves the cursor to a block."""
        if self.pool is None or not self.pool.num_blocks:
            return
        self._forget(self._cursor)
        self._cursor = max(0, min(self.grid.num_blocks - 1, block))
        row = self.grid.row_of(self._cursor)
        if not self._top <= row < self._top + self.size.height:
            self._bring_to_top(row if row < self._top else row - self.size.height + 1)
        self._forget(self._cursor)
        self.post_message(self.Pointed())

    def repaint(self) -> None:
        self._waiting.clear()
        self._groups.clear()
        self._overlays = None
        self._styles = None
        self._runs.clear()
        self._run_styles.clear()
        self._lit_styles.clear()
        super().repaint()

    def on_resize(self) -> None:
        if self._fit():
            self.repaint()

    def on_focus(self) -> None:
        self._forget(self._cursor)

    def on_blur(self) -> None:
        self._forget(self._cursor)

    def on_mouse_move(self, event: events.MouseMove) -> None:
        self._hover(self.grid.block_at(event.x, event.y + self._top))

    def on_leave(self) -> None:
        self._hover(None)

    def on_click(self, event: events.Click) -> None:
        block = self.grid.block_at(event.x, event.y + self._top)
        if block is not None:
            self.point(block)
            if event.chain > 1:
                self.post_message(self.Opened())

    def on_mouse_scroll_down(self) -> None:
        self._bring_to_top(self._top + 2)

    def on_mouse_scroll_up(self) -> None:
        self._bring_to_top(self._top - 2)

    def action_move(self, cells: int, rows: int) -> None:
        self._hover(None)
        self.point(self._cursor + cells * self.grid.per_cell + rows * self.grid.blocks_per_row)

    def action_page(self, pages: int) -> None:
        self.action_move(0, pages * max(1, self.size.height - 1))

    def action_jump(self, to_end: bool) -> None:
        self._hover(None)
        self.point(self.grid.num_blocks - 1 if to_end else 0)

    def action_zoom(self) -> None:
        """One cell a block, with the rest out of sight, or the whole pool at once."""
        self._is_zoomed = not self._is_zoomed
        self._fit()
        self.repaint()
        self.point(self._cursor)

    def action_open(self) -> None:
        self.post_message(self.Opened())

    def make_line(self, y: int, width: int) -> Segments:
        row = y + self._top
        if self.pool is None or row >= self.grid.num_rows:
            rest = self._rest if row == self.grid.num_rows else ""
            return [Segment(rest[:width].ljust(width), self.look.palette.style("faint"))]
        return self._row(row, width)

    @property
    def _rest(self) -> str:
        """What is said of the blocks behind the last cell."""
        num_more = 0 if self.pool is None else self.pool.num_blocks - self.grid.num_blocks
        return f"{' ' * self.grid.label_width} {numbers.count(num_more, 0)} more blocks, all free" if num_more else ""

    def _fit(self) -> bool:
        """Takes the grid that fits; whether it is another one."""
        pool, height = self.pool, self.size.height
        num_blocks = 0 if pool is None else pool.num_blocks
        if pool is not None and not self._is_zoomed:
            num_blocks = blocks_in_sight(pool.num_blocks, pool.extent)
            height -= num_blocks < pool.num_blocks and height >= _LEAST_ROWS_WITH_REST
        grid = Grid.fit(num_blocks, self.size.width, num_blocks if self._is_zoomed else height)
        is_other = grid != self.grid
        self.grid = grid
        self._top = max(0, min(self._top, grid.num_rows - self.size.height))
        self._cursor = min(self._cursor, max(0, num_blocks - 1))
        return is_other

    def _bring_to_top(self, top: int) -> None:
        top = max(0, min(top, self.grid.num_rows - self.size.height))
        if top != self._top:
            self._top = top
            super().repaint()

    def _hover(self, block: int | None) -> None:
        if block == self._hovered:
            return
        for other in (self._hovered, block):
            if other is not None:
                self._forget(other)
        self._hovered = block
        self.post_message(self.Pointed())

    def _forget(self, block: int) -> None:
        """Has a block drawn again that the cursor comes to or leaves."""
        self._overlays = None
        self._forget_groups((block // self.grid.blocks_per_group,))

    def _forget_groups(self, groups: Collection[int]) -> None:
        """Has these groups drawn again."""
        for group in groups:
            self._groups.pop(group, None)
        per_row = self.grid.num_columns // GROUP
        self.forget({group // per_row - self._top for group in groups})

    def _row(self, row: int, width: int) -> Segments:
        """The label, then the groups of cells."""
        grid, palette = self.grid, self.look.palette
        cells = grid.cells(row)
        segments = [Segment(f"{cells.start:0{grid.label_width}}", palette.style("faint"))]
        first = cells.start // grid.blocks_per_group
        for group in range(first, first + ceil(len(cells) / GROUP)):
            drawn = self._groups.get(group)
            if drawn is None:
                drawn = self._groups[group] = self._group(group)
            segments += drawn
        # Every glyph is one cell wide, so nothing has to be measured.
        used = grid.label_width + ceil(len(cells) / GROUP) + len(cells)
        if used < width:
            segments.append(Segment(" " * (width - used), palette.ground))
        return segments

    def _group(self, group: int) -> Segments:
        """A gap and eight cells; those that look alike side by side are one segment."""
        grid = self.grid
        start = group * grid.blocks_per_group
        blocks = range(start, min(grid.num_blocks, start + grid.blocks_per_group), grid.per_cell)
        cells = self._block_cells(blocks) if grid.per_cell == 1 else self._run_cells(blocks)
        over = self._over_cells()
        segments = [Segment(" ", self.look.palette.ground)]
        text, last = "", None
        for cell, (glyph, plain) in enumerate(cells, group * GROUP):
            style = self._over(plain, over[cell]) if cell in over else plain
            if style is last:
                text += glyph
            else:
                if last is not None:
                    segments.append(Segment(text, last))
                text, last = glyph, style
        segments.append(Segment(text, last))
        return segments

    def _block_cells(self, blocks: range) -> list[_Drawn]:
        """Cells of one block each. Equal looks have the same style object."""
        assert self.pool is not None
        cells, plain, partial = self._cell_styles()
        looks = self.pool.looks[blocks.start : blocks.stop]
        has_room = self.pool.partial[blocks.start : blocks.stop]
        return [
            (cells[look].glyph, partial[look] if room else plain[look])
            for look, room in zip(looks, has_room, strict=True)
        ]

    def _run_cells(self, blocks: range) -> list[_Drawn]:
        """Cells of the runs that begin with `blocks`."""
        assert self.pool is not None
        looks, per_cell, known = self.pool.looks, self.grid.per_cell, self._runs
        return [
            known.get(run := looks[block : block + per_cell]) or self._new_run(run)  # most runs were drawn before
            for block in blocks
        ]

    def _new_run(self, looks: bytes) -> _Drawn:
        if len(self._runs) >= _MAX_RUNS:
            self._runs.clear()
        cell = run_cell(looks, self.look.glyphs.is_unicode)
        style = self.look.palette.style(cell.role)
        if cell.ground:
            # The cell's own ground would hide how high the level is.
            style = self.look.palette.style(cell.ground) + Style(color=style.color, bold=style.bold)
        # The few styles that there are, each as one object.
        drawn = self._runs[looks] = cell.glyph, self._run_styles.setdefault(style, style)
        return drawn

    def _over_cells(self) -> dict[int, str]:
        """What goes over cells, by their number in the pool; the later the stronger."""
        if self._overlays is None:
            per_cell = self.grid.per_cell
            self._overlays = {
                block // per_cell: kind
                for kind, blocks in (("lit", self._lit), ("taken", self._taken), ("evicted", self._evicted))
                for block in blocks
            }
            if self.has_focus or self._hovered is not None:
                self._overlays[self.pointed // per_cell] = "cursor"
        return self._overlays

    def _over(self, style: Style, kind: str) -> Style:
        palette = self.look.palette
        match kind:
            case "cursor":
                return palette.cursor
            case "taken":
                return palette.taken
            case "evicted":
                return palette.evicted
        lit = self._lit_styles.get(style)
        if lit is None:
            # A run keeps its ground, against which its level stands out.
            bright = Style(color=palette.style("strong").color, bold=True)
            lit = self._lit_styles[style] = style + (_LIT if self.grid.per_cell == 1 else bright)
        return lit

    def _cell_styles(self) -> tuple[list[Cell], list[Style], list[Style]]:
        """For each look its cell, its style, and its style when the block has room left. Made once a palette."""
        if self._styles is None:
            cells = block_cells(self.look.glyphs)
            plain = [self.look.palette.style(cell.role) for cell in cells]
            self._styles = cells, plain, [style + _PARTIAL for style in plain]
        return self._styles
