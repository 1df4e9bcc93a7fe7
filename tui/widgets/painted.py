"""Widgets made of lines that are kept, and how what a frame changed in them gets onto the screen.

Asked to refresh a line, Textual composes it anew from all widgets on it and writes all of it. Four times a second that
would be most of what a screen costs, and here nothing lies on top of anything: while a frame is drawn, what changed is
collected in a `Painting`, which writes the cells that differ and nothing else. At any other time Textual is asked to
refresh, as usual; both draw the same lines.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, cast

from rich.cells import cell_len
from rich.color import ColorSystem
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from textual._compositor import CompositorUpdate
from textual.errors import NoWidget
from textual.geometry import Region, Size, Spacing
from textual.screen import Screen
from textual.strip import Strip
from textual.widget import Widget

from pagedd.tui.glyphs import Glyphs
from pagedd.tui.themes import Palette

Segments = list[Segment]
_PLAIN = Style()


class Look(Protocol):
    """What widgets ask of their app. `painting` is there while a frame is drawn."""

    palette: Palette
    glyphs: Glyphs
    painting: "Painting | None"


class Painted(Widget):
    """Subclasses make a line in `make_line`, and say in `forget` which lines look different now.

    Lines are counted from the widget's upper edge, its frame included. One that is not kept is out of sight, or Textual
    is about to draw it.
    """

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._kept: dict[int, Segments] = {}
        self._kept_width = 0
        self._kept_shape: tuple[Size, Spacing] | None = None

    @property
    def look(self) -> Look:
        return cast(Look, self.app)

    def make_line(self, y: int, width: int) -> Segments:
        """Line `y`, exactly `width` cells wide."""
        raise NotImplementedError

    def forget(self, lines: Iterable[int]) -> None:
        """Has these lines drawn again."""
        known = {y: line for y in lines if (line := self._kept.pop(y, None)) is not None}
        if not known:
            return
        painting = self.look.painting
        if painting is None:
            # Textual counts from the content's corner.
            top, _, _, left = self.gutter
            self.refresh(*(Region(-left, y - top, self._kept_width, 1) for y in known))
        else:
            painting.add(self, known)

    def repaint(self) -> None:
        """Has everything drawn again: the palette is another one, or another part is in sight."""
        self._kept.clear()
        self.refresh()

    def line(self, y: int) -> Segments:
        line = self._kept.get(y)
        if line is None:
            line = self._kept[y] = self.make_line(y, self._kept_width)
        return line

    def render_lines(self, crop: Region) -> list[Strip]:
        """All there is on these lines: frame and ground are in them, so there is nothing for Textual to add."""
        width = self.outer_size.width
        if (shape := (self.outer_size, self.gutter)) != self._kept_shape:
            self._kept.clear()
            self._kept_shape, self._kept_width = shape, width
        strips = [Strip(self.line(y), width) for y in crop.line_range]
        return strips if crop.column_span == (0, width) else [strip.crop(*crop.column_span) for strip in strips]


class Painting(CompositorUpdate):
    """What one frame changed: lines of widgets, each as it is on screen so far."""

    def __init__(self) -> None:
        self._lines: dict[Painted, dict[int, Segments]] = {}
        self._runs: list[tuple[int, int, Segments]] = []

    def add(self, widget: Painted, lines: dict[int, Segments]) -> None:
        # What was there first is what is on screen.
        self._lines[widget] = lines | self._lines.get(widget, {})

    def compose(self, screen: Screen[Any]) -> bool:
        """Finds the cells that differ, now that every widget has what it will show; whether there are any."""
        for widget, lines in self._lines.items():
            try:
                region, _, clip, *_ = screen.find_widget(widget)
            except NoWidget:
                continue  # the screen has no room for it
            if clip.intersection(region) != region:
                widget.refresh()
                continue
            for y, before in lines.items():
                if y < region.height:
                    self._compare(region.x, region.y + y, before, widget.line(y))
        return bool(self._runs)

    def _compare(self, x: int, y: int, old: Segments, new: Segments) -> None:
        """Keeps what is new; a segment that was in the same place before is on screen already."""
        before = dict(_placed(x, old))
        run: Segments | None = None
        for at, segment in _placed(x, new):
            if before.get(at) == segment:
                run = None
            elif run is None:
                run = [segment]
                self._runs.append((at, y, run))
            else:
                run.append(segment)

    def render_segments(self, console: Console) -> str:
        """The bytes for the terminal; Textual writes them."""
        colours = console._color_system or ColorSystem.TRUECOLOR
        written: list[str] = []
        for x, y, segments in self._runs:
            written.append(f"\x1b[{y + 1};{x + 1}H")
            written += (Strip.render_style(style or _PLAIN, text, colours) for text, style, _ in segments)
        return "".join(written)


def _placed(x: int, segments: Segments) -> Iterator[tuple[int, Segment]]:
    """Each segment with the cell that it begins in."""
    for segment in segments:
        yield x, segment
        x += cell_len(segment.text)
