"""A panel that draws lines in a frame or without one, and redraws only those that changed.

Frames come four times a second and most of what they say is what the last one said, so a line is compared with the one
before it, and painted only when it differs.
"""

from collections.abc import Sequence

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style

from pagedd.tui.line import Line, fit, printable
from pagedd.tui.widgets.painted import Painted, Segments

_GROUNDLESS = frozenset(("", "dim", "faint", "strong", "accent", "ok", "warn", "bad", "key"))
# Corners, edges and sides, clockwise from the upper left.
_ROUND = "╭─╮│╯─╰│"
_ASCII = "+-+|+-+|"


class Pane(Painted):
    """Shows what `show` was given last. Its frame is drawn here; the style sheet has it for the room that it takes."""

    DEFAULT_CSS = """
    Pane { width: 1fr; height: 1fr; }
    Pane.framed { border: round $border-blurred; padding: 0 1; }
    """

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._lines: list[Line] = []
        self._title = ""
        self._subtitle = ""

    def show(self, lines: Sequence[Line]) -> None:
        """Puts these lines in the place of those before."""
        num_common = min(len(lines), len(self._lines))
        changed = [y for y in range(num_common) if lines[y] != self._lines[y]]
        changed += range(num_common, max(len(lines), len(self._lines)))
        self._lines = list(lines)
        self.forget_lines(changed)

    def forget_lines(self, lines: Sequence[int]) -> None:
        """Has these lines of the content drawn again."""
        if lines:
            top = self.gutter.top
            self.forget([y + top for y in lines])

    def title(self, text: str) -> None:
        if self._title != text:
            self._title = text
            self.forget([0])

    def subtitle(self, text: str) -> None:
        if self._subtitle != text:
            self._subtitle = text
            self.forget([self.outer_size.height - 1])

    def make_line(self, y: int, width: int) -> Segments:
        top, right, bottom, left = self.gutter
        if y < top or y >= self.outer_size.height - bottom:
            return self._edge(y < top, width)
        line = self._inside(y - top, width - left - right)
        if not left:
            return line
        glyph = self._frame[3] if top else " "
        side = self.look.palette.style(self._frame_role)
        return [Segment(glyph.ljust(left), side), *line, Segment(glyph.rjust(right), side)]

    @property
    def _frame(self) -> str:
        return _ROUND if self.look.glyphs.is_unicode else _ASCII

    @property
    def _frame_role(self) -> str:
        return "edge.focus" if self.has_focus else "edge"

    def _edge(self, is_upper: bool, width: int) -> Segments:
        """`╭─ Title ────╮`, and below `╰──── Subtitle ─╯`."""
        left, edge, right = list(self._frame[:3] if is_upper else self._frame[6:3:-1])
        style = self.look.palette.style
        text = printable(self._title if is_upper else self._subtitle)
        if not text or width < 8:
            return [Segment(left + edge * (width - 2) + right, style(self._frame_role))]
        text = fit(text, min(cell_len(text), width - 6), self.look.glyphs.ellipsis)
        rest = edge * (width - 5 - cell_len(text))
        before, after = (edge, rest) if is_upper else (rest, edge)
        return [
            Segment(left + before, style(self._frame_role)),
            Segment(f" {text} ", style("")),
            Segment(after + right, style(self._frame_role)),
        ]

    def _inside(self, y: int, width: int) -> Segments:
        if y >= len(self._lines):
            return [Segment(" " * width, self.look.palette.ground)]
        segments = self._paint(y)
        rest = width - sum(cell_len(text) for text, _, _ in segments)
        return [*segments, Segment(" " * rest, self._rest_style(y))] if rest > 0 else segments

    def _paint(self, y: int) -> Segments:
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
        return segments

    def _rest_style(self, y: int) -> Style:
        """What the rest of a line looks like."""
        return self.look.palette.ground
