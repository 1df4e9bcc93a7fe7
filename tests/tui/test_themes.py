"""Colours: each theme has every role and state, and goes no further than the terminal does."""

import os

import pytest

from pagedd.tui.glyphs import ASCII, SHARED, UNICODE, Glyphs
from pagedd.tui.themes import GROUNDS, ROLES, choose_theme, make_palettes
from pagedd.tui.widgets.block_map import BlockMap

from .conftest import FrozenReplay, make_app, make_source, screen_text, settled


@pytest.mark.parametrize("theme", ["dark", "light", "contrast", "16", "none"])
@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
async def test_every_theme_shows_every_state_as_a_glyph(theme: str, glyphs: Glyphs) -> None:
    app = make_app(FrozenReplay(), theme=theme, glyphs=glyphs)
    async with app.run_test(size=(120, 38), notifications=True) as pilot:
        await settled(pilot)
        text, region = screen_text(app), app.screen.query_one(BlockMap).region
        cells = "".join(line[region.x : region.right] for line in text.splitlines()[region.y : region.bottom])
        for state in (SHARED, glyphs.cached[1], "a"):
            assert state in cells
        assert "decode" in text
        if glyphs is ASCII:
            assert text.isascii()


def test_every_palette_knows_every_role() -> None:
    for palette in make_palettes().values():
        assert set(ROLES) | set(GROUNDS) <= set(palette.styles)
        assert set(palette.greyed.styles) == set(palette.styles)


def test_no_colour_means_no_colour() -> None:
    palette = make_palettes()["none"]
    styles = [*palette.styles.values(), palette.selected, palette.cursor, palette.taken, palette.evicted, palette.grey]
    assert all(style.color is None and style.bgcolor is None for style in styles)


def test_sixteen_colours_are_the_terminals_own() -> None:
    for style in make_palettes()["16"].styles.values():
        assert style.color is None or style.color.number is None or style.color.number < 16
        assert style.bgcolor is None


@pytest.mark.parametrize(
    ("environ", "theme"),
    [
        ({"TERM": "xterm-256color"}, "dark"),
        ({"TERM": "xterm", "COLORTERM": "truecolor"}, "dark"),
        ({"TERM": "linux"}, "16"),
        ({"TERM": "xterm-256color", "COLORFGBG": "0;15"}, "light"),
        ({"TERM": "xterm-256color", "COLORFGBG": "15;0"}, "dark"),
        ({"TERM": "xterm-256color", "NO_COLOR": "1"}, "none"),
        ({"TERM": "xterm-256color", "NO_COLOR": ""}, "dark"),
    ],
)
def test_the_theme_follows_the_terminal(environ: dict[str, str], theme: str) -> None:
    assert choose_theme(environ) == theme


async def test_no_color_leaves_no_colour_on_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    app = make_app(make_source(), theme=choose_theme(os.environ))
    async with app.run_test(size=(120, 38), notifications=True) as pilot:
        await settled(pilot)
        styles = {segment.style for strip in app.screen._compositor.render_strips() for segment in strip}
        coloured = [style for style in styles if style is not None and style.color is not None]
        assert all(style.color is None or style.color.is_default for style in coloured)
