"""A panel that draws lines, and redraws only those that changed.

Frames come four times a second and most of what they say is what the last one said, so every panel is made of strips
that are kept, and Textual is asked to repaint single lines.
"""

from collections.abc import Sequence
from typing import Protocol, cast

from rich.segment import Segment
from rich.style import Style
from textual.filter import ANSIToTruecolor, LineFilter
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from pagedd.tui.glyphs import Glyphs
from pagedd.tui.line import Line
from pagedd.tui.themes import Palette

_GROUNDLESS = frozenset(("", "dim", "faint", "strong", "accent", "ok", "warn", "bad", "key"))


class Look(Protocol):
    """What panels ask of their app."""

    palette: Palette
    glyphs: Glyphs


class Pane(Widget):
    """Shows what `show` was given last."""

    DEFAULT_CSS = """
    Pane { width: 1fr; height: 1fr; }
    Pane.framed { border: round $border-blurred; border-title-color: $foreground; padding: 0 1; }
    Pane.framed:focus { border: round $border; }
    """

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._lines: list[Line] = []
        self._strips: list[Strip | None] = []

    @property
    def look(self) -> Look:
        return cast(Look, self.app)

    def show(self, lines: Sequence[Line]) -> None:
        """Puts these lines in the place of those before."""
        num_common = min(len(lines), len(self._lines))
        changed = [y for y in range(num_common) if lines[y] != self._lines[y]]
        self._forget(*changed, *range(num_common, max(len(lines), len(self._lines))))
        self._lines = list(lines)
        self._strips = (self._strips + [None] * len(lines))[: len(lines)]

    def title(self, text: str) -> None:
        if self.border_title != text:
            self.border_title = text

    def repaint(self) -> None:
        """The palette is another one: draws everything again."""
        self._strips = [None] * len(self._lines)
        self.refresh()

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Without the one that looks for the terminal's own colours: the palettes that it is for have none."""
        return [
            line_filter for line_filter in super().get_line_filters() if not isinstance(line_filter, ANSIToTruecolor)
        ]

    def render_lines(self, crop: Region) -> list[Strip]:
        """Without Textual's own cache where it has nothing to add: a pane without a frame is its strips."""
        if self.gutter.width or self.gutter.height:
            return super().render_lines(crop)
        strips = [self.render_line(y) for y in crop.line_range]
        is_whole = crop.column_span == (0, self.size.width)
        return strips if is_whole else [strip.crop(*crop.column_span) for strip in strips]

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        if y >= len(self._lines):
            return Strip.blank(width, self.look.palette.ground)
        strip = self._strips[y]
        if strip is None or strip.cell_length != width:
            strip = self._strips[y] = self._paint(y).adjust_cell_length(width, self._rest_style(y))
        return strip

    def _paint(self, y: int) -> Strip:
        style = self.look.palette.style
        segments: list[Segment] = []
        last, joined = "", ""
        for text, role in self._lines[y]:
            # A gap looks the same in any role that has no ground of its own; it goes with what is before it.
            if role == last or (not role and text.isspace() and last in _GROUNDLESS):
                joined += text
            else:
                if joined:
                    segments.append(Segment(joined, style(last)))
                last, joined = role, text
        if joined:
            segments.append(Segment(joined, style(last)))
        return Strip(segments)

    def _rest_style(self, y: int) -> Style:
        """What the rest of a line looks like."""
        return self.look.palette.ground

    def _forget(self, *lines: int) -> None:
        """Has these lines drawn again."""
        for y in lines:
            if y < len(self._strips):
                self._strips[y] = None
        if lines:
            width = self.size.width
            self.refresh(*(Region(0, y, width, 1) for y in lines))
