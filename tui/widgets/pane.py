"""A panel that draws lines, and redraws only those that changed.

Frames come four times a second and most of what they say is what the last one said, so every panel is made of strips
that are kept, and Textual is asked to repaint single lines.
"""

from collections.abc import Sequence
from typing import Protocol, cast

from rich.segment import Segment
from rich.style import Style
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
        for y in range(max(len(lines), len(self._lines))):
            before = self._lines[y] if y < len(self._lines) else None
            after = lines[y] if y < len(lines) else None
            if before != after:
                self._forget(y)
        self._lines = list(lines)
        self._strips = (self._strips + [None] * len(lines))[: len(lines)]

    def title(self, text: str) -> None:
        if self.border_title != text:
            self.border_title = text

    def repaint(self) -> None:
        """The palette is another one: draws everything again."""
        self._strips = [None] * len(self._lines)
        self.refresh()

    def render_line(self, y: int) -> Strip:
        if y >= len(self._lines):
            return Strip.blank(self.size.width, self.look.palette.ground)
        strip = self._strips[y]
        if strip is None or strip.cell_length != self.size.width:
            strip = self._strips[y] = self._paint(y).adjust_cell_length(self.size.width, self._rest_style(y))
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

    def _forget(self, y: int) -> None:
        if y < len(self._strips):
            self._strips[y] = None
        self.refresh(Region(0, y, self.size.width, 1))
