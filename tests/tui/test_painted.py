"""What a frame paints onto the terminal makes it look as if everything had been drawn anew."""

import re

import pytest
from rich.cells import cell_len
from rich.console import RenderableType
from textual._compositor import Compositor
from textual.screen import Screen

from pagedd.bench.frames import FakeEngine
from pagedd.tui.pagetop import Pagetop
from pagedd.tui.widgets.painted import Painting

from .conftest import FakeSource, make_app, settled

_PIECE = re.compile(r"\x1b\[(\d+);(\d+)H|\x1b\[([\d;]*)m|(.)", re.DOTALL)


class Terminal:
    """As much of one as pagetop needs: moving, attributes, text. `cells` are (character, attributes) by (y, x)."""

    def __init__(self) -> None:
        self.cells: dict[tuple[int, int], tuple[str, str]] = {}

    def write(self, text: str) -> None:
        y, x, attributes = 0, 0, ""
        for row, column, codes, char in _PIECE.findall(text):
            if row:
                y, x = int(row) - 1, int(column) - 1
            elif char:
                self.cells[y, x] = char, attributes
                x += cell_len(char)
            else:
                attributes = "" if codes in ("", "0") else codes


def whole_picture(app: Pagetop) -> Terminal:
    terminal = Terminal()
    for y, strip in enumerate(app.screen._compositor.render_strips()):
        terminal.write(f"\x1b[{y + 1};1H{strip.render(app.console)}")
    return terminal


class Tube:
    """Takes what an app paints in the place of its terminal."""

    def __init__(self, app: Pagetop, monkeypatch: pytest.MonkeyPatch) -> None:
        self.terminal = Terminal()
        self.num_bytes: list[int] = []
        self._app = app
        monkeypatch.setattr(app, "_display", self._display)

    def _display(self, screen: Screen[object], renderable: RenderableType | None) -> None:
        if isinstance(renderable, Painting):
            text = renderable.render_segments(self._app.console)
            self.terminal.write(text)
            self.num_bytes.append(len(text))
        elif renderable is not None:
            self.terminal = whole_picture(self._app)


@pytest.mark.parametrize("key", ["1", "2", "3", "4", "5", "enter"])
@pytest.mark.parametrize(("size", "theme"), [((160, 48), "dark"), ((80, 24), "none")], ids=["160x48", "80x24"])
async def test_a_painted_frame_looks_like_one_drawn_anew(
    key: str, size: tuple[int, int], theme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine(num_blocks=3000, num_requests=24)
    source = FakeSource([engine.frame() for _ in range(20)])
    app = make_app(source, theme=theme)
    async with app.run_test(size=size) as pilot:
        await settled(pilot)
        await pilot.press(key)
        await pilot.pause(0.3)
        await settled(pilot)
        tube = Tube(app, monkeypatch)
        app.screen.refresh()
        await settled(pilot)
        for number in range(9):
            source.say(engine.frame())
            if number % 4 == 3:
                await pilot.press("down")
                await pilot.pause(0.3)  # what is asked of the source after a moment
            await settled(pilot)
            assert tube.terminal.cells == whole_picture(app).cells
    # Not every frame has something new for the screens that ask for what they show.
    assert tube.num_bytes or key in "45"


async def test_a_frame_that_says_the_same_paints_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = FakeEngine().frame()
    source = FakeSource([frame])
    app = make_app(source)
    async with app.run_test(size=(160, 48)) as pilot:
        await settled(pilot)
        source.say(frame)
        await settled(pilot)
        tube = Tube(app, monkeypatch)
        source.say(frame)
        await settled(pilot)
        assert tube.num_bytes == []


async def test_frames_of_the_overview_go_past_textuals_compositor(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(num_blocks=3000, num_requests=24)
    source = FakeSource([engine.frame() for _ in range(20)])
    app = make_app(source)
    async with app.run_test(size=(160, 48)) as pilot:
        await settled(pilot)
        drawn: list[bool] = []
        monkeypatch.setattr(Compositor, "render_update", lambda *args, **options: drawn.append(True))
        for _ in range(5):
            source.say(engine.frame())
            await settled(pilot)
        assert len(drawn) <= 1, "the answer about the block under the cursor, and no frame"


async def test_under_a_question_nothing_is_painted_past_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    source = FakeSource([engine.frame() for _ in range(20)])
    app = make_app(source)
    async with app.run_test(size=(120, 38)) as pilot:
        await settled(pilot)
        tube = Tube(app, monkeypatch)
        await pilot.press("k")
        await settled(pilot)
        source.say(engine.frame())
        await settled(pilot)
        assert tube.num_bytes == []
        await pilot.press("n")
        await settled(pilot)
        source.say(engine.frame())
        await settled(pilot)
        assert tube.terminal.cells == whole_picture(app).cells
        assert tube.num_bytes
