"""What a role looks like: five palettes, from true colour down to none.

Owns colours and text attributes. Which role a piece of text has is decided where the text is made; no renderable names
a colour. One accent; yellow and red only for what a person should act on.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from rich.style import Style
from textual.theme import Theme

from pagedd.tui.letters import NUM_HUES

ROLES = (
    *("", "dim", "faint", "strong", "title", "accent", "ok", "warn", "bad", "key"),
    *("bar", "bar.cached", "track", "frame", "edge", "edge.focus", "graph.out", "graph.in"),
    *("state.decode", "state.prefill", "state.waiting", "state.preempted"),
    *("free", "cached0", "cached1", "cached2", "cached3", "shared", "ended"),
    *(f"own{hue}" for hue in range(NUM_HUES)),
)
# A cell of a run of blocks stands on what is not used in the run.
GROUNDS = ("ground.free", "ground.cached")


@dataclass(frozen=True, eq=False)
class Palette:
    """A style for each role, and the marks that go on top of any role.

    Attributes:
        ground: of cells with nothing in them.
        selected: a row, or a sequence's blocks, that the cursor is on.
        cursor: the block that the cursor is on.
        taken: a block that was just given to a sequence.
        evicted: a block whose content was just given up.
        grey: what everything looks like once the daemon is lost.
    """

    theme: Theme
    ground: Style
    styles: Mapping[str, Style]
    selected: Style
    cursor: Style
    taken: Style
    evicted: Style
    grey: Style

    def style(self, role: str) -> Style:
        return self.styles[role]

    @cached_property
    def greyed(self) -> "Palette":
        """The same without colours: nothing on screen holds any more."""
        # Why it is grey is the one thing that still holds.
        styles = dict.fromkeys(self.styles, self.grey) | {"bad": self.styles["bad"]}
        plain = Style(reverse=True)
        return Palette(self.theme, self.ground, styles, plain, plain, Style(), Style(), self.grey)


def oklch(lightness: float, chroma: float, degrees: float) -> str:
    """An OKLCH colour as `#rrggbb`, clipped to what sRGB has. Equal lightness looks equally bright in any hue.

    Source: Björn Ottosson, "A perceptual color space for image processing" (2020).
    """
    a, b = chroma * math.cos(math.radians(degrees)), chroma * math.sin(math.radians(degrees))
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )
    return "#" + "".join(f"{_gamma(channel):02x}" for channel in linear)


def _gamma(linear: float) -> int:
    clipped = min(1.0, max(0.0, linear))
    encoded = 12.92 * clipped if clipped <= 0.0031308 else 1.055 * clipped ** (1 / 2.4) - 0.055
    return round(255 * encoded)


def _hue_degrees(hue: int) -> float:
    # Neighbouring numbers are far apart: a sequence and the next one are rarely alike.
    return (255 + 150 * hue) % 360


@dataclass(frozen=True, slots=True)
class _Colours:
    background: str
    panel: str
    foreground: str
    dim: str
    faint: str
    accent: str
    ok: str
    warn: str
    bad: str
    selected: str
    bar: str
    cached: tuple[str, str, str, str]
    cached_tile: tuple[str, str, str, str] | None
    cached_ground: str
    shared_tile: str
    hue_text: tuple[float, float]  # lightness, chroma
    hue_ground: tuple[float, float] | None


_DARK = _Colours(
    background="#0e1116",
    panel="#2a313c",
    foreground="#d5dbe3",
    dim="#8b95a3",
    faint="#414a57",
    accent="#6cb6ff",
    ok="#7bd88f",
    warn="#e5b454",
    bad="#ff7a72",
    selected="#1f2a3a",
    bar="#4286c9",
    cached=("#6e654f", "#585140", "#443f33", "#353129"),
    cached_tile=("#3f392c", "#322e24", "#27241d", "#1e1c18"),
    cached_ground="#2b2820",
    shared_tile="#4a5668",
    hue_text=(0.83, 0.11),
    hue_ground=(0.33, 0.065),
)
_LIGHT = _Colours(
    background="#fbfbf9",
    panel="#cfd4da",
    foreground="#20262d",
    dim="#646d78",
    faint="#b9c0c8",
    accent="#0a5fc2",
    ok="#1a7f37",
    warn="#925f00",
    bad="#c01c28",
    selected="#dde9f8",
    bar="#3f83d1",
    cached=("#b5a77f", "#c3b793", "#d0c7aa", "#ddd6c0"),
    cached_tile=("#dacfae", "#e2d9bf", "#e9e2cf", "#f1ecdf"),
    cached_ground="#ece5d3",
    shared_tile="#c3ccd8",
    hue_text=(0.42, 0.13),
    hue_ground=(0.91, 0.055),
)
_CONTRAST = _Colours(
    background="#000000",
    panel="#ffffff",
    foreground="#ffffff",
    dim="#e0e0e0",
    faint="#a8a8a8",
    accent="#ffff00",
    ok="#00ff66",
    warn="#ffb000",
    bad="#ff6b6b",
    selected="#003a9e",
    bar="#ffff00",
    cached=("#b0b0b0", "#989898", "#808080", "#6c6c6c"),
    cached_tile=None,
    cached_ground="#3a3a3a",
    shared_tile="#606060",
    hue_text=(0.90, 0.14),
    hue_ground=None,
)


def _true_colour(name: str, colours: _Colours, *, dark: bool) -> Palette:
    text, tile = colours.hue_text, colours.hue_ground
    owners = {
        f"own{hue}": Style(
            color=oklch(*text, _hue_degrees(hue)),
            bgcolor=oklch(*tile, _hue_degrees(hue)) if tile is not None else None,
        )
        for hue in range(NUM_HUES)
    }
    named = {
        "": colours.foreground,
        "dim": colours.dim,
        "faint": colours.faint,
        "accent": colours.accent,
        "ok": colours.ok,
        "warn": colours.warn,
        "bad": colours.bad,
        "bar": colours.bar,
        "bar.cached": colours.cached[0],
        "track": colours.faint,
        "frame": colours.faint,
        "edge": colours.panel,
        "edge.focus": colours.accent,
        "graph.out": colours.bar,
        "graph.in": colours.dim,
        "state.decode": colours.ok,
        "state.prefill": colours.accent,
        "state.waiting": colours.dim,
        "state.preempted": colours.warn,
        "free": colours.faint,
        "ended": colours.dim,
    }
    styles = {role: Style(color=colour) for role, colour in named.items()} | owners
    tiles = colours.cached_tile or (None,) * len(colours.cached)
    for age, (colour, cached_tile) in enumerate(zip(colours.cached, tiles, strict=True)):
        styles[f"cached{age}"] = Style(color=colour, bgcolor=cached_tile)
    styles["strong"] = styles["title"] = Style(color=colours.foreground, bold=True)
    styles["key"] = Style(color=colours.accent, bold=True)
    styles["shared"] = Style(color=colours.foreground, bgcolor=colours.shared_tile, bold=True)
    styles["ground.free"] = Style(bgcolor=colours.background)
    styles["ground.cached"] = Style(bgcolor=colours.cached_ground)
    ground = Style(color=colours.foreground, bgcolor=colours.background)
    theme = Theme(
        name=name,
        primary=colours.accent,
        secondary=colours.dim,
        accent=colours.accent,
        warning=colours.warn,
        error=colours.bad,
        success=colours.ok,
        foreground=colours.foreground,
        background=colours.background,
        surface=colours.background,
        panel=colours.panel,
        dark=dark,
        variables={"border": colours.accent, "border-blurred": colours.panel},
    )
    return Palette(
        theme=theme,
        ground=ground,
        styles={role: ground + style for role, style in styles.items()},
        selected=Style(bgcolor=colours.selected, bold=True),
        cursor=Style(color=colours.background, bgcolor=colours.accent, bold=True),
        taken=Style(color=colours.background, bgcolor=colours.foreground, bold=True),
        evicted=Style(color=colours.background, bgcolor=colours.warn),
        grey=Style(color=colours.dim, bgcolor=colours.background),
    )


def _sixteen_colours() -> Palette:
    """What the terminal's own sixteen colours are is its user's choice, so none of them is used as a background."""
    hues = ("blue", "yellow", "magenta", "green", "red", "cyan")
    named = {
        "dim": "default",
        "faint": "bright_black",
        "accent": "cyan",
        "ok": "green",
        "warn": "yellow",
        "bad": "red",
        "bar": "cyan",
        "bar.cached": "bright_black",
        "track": "bright_black",
        "frame": "bright_black",
        "edge": "bright_black",
        "edge.focus": "cyan",
        "graph.out": "cyan",
        "graph.in": "default",
        "state.decode": "green",
        "state.prefill": "cyan",
        "state.waiting": "default",
        "state.preempted": "yellow",
        "free": "bright_black",
        "cached0": "default",
        "cached1": "default",
        "cached2": "bright_black",
        "cached3": "bright_black",
        "ended": "bright_black",
        **{
            f"own{hue}": hues[hue % len(hues)] if hue < len(hues) else "bright_" + hues[hue % len(hues)]
            for hue in range(NUM_HUES)
        },
    }
    styles = {role: Style(color=colour) for role, colour in named.items()}
    styles[""] = styles["ground.free"] = styles["ground.cached"] = Style()
    styles["strong"] = styles["title"] = Style(bold=True)
    styles["key"] = Style(color="cyan", bold=True)
    styles["shared"] = Style(bold=True)
    return Palette(
        theme=_ansi_theme("16"),
        ground=Style(),
        styles=styles,
        selected=Style(color="default", reverse=True, bold=True),
        cursor=Style(color="cyan", reverse=True, bold=True),
        taken=Style(reverse=True, bold=True),
        evicted=Style(color="yellow", reverse=True),
        grey=Style(color="bright_black"),
    )


def _no_colours() -> Palette:
    """For `NO_COLOR`: attributes alone; every state has its own glyph."""
    styles = dict.fromkeys((*ROLES, *GROUNDS), Style())
    for role in ("dim", "faint", "free", "track", "frame", "cached2", "cached3"):
        styles[role] = Style(dim=True)
    for role in ("strong", "title", "key", "warn", "bad", "edge.focus", "shared", "state.preempted"):
        styles[role] = Style(bold=True)
    return Palette(
        theme=_ansi_theme("none"),
        ground=Style(),
        styles=styles,
        selected=Style(reverse=True),
        cursor=Style(reverse=True, bold=True),
        taken=Style(reverse=True, bold=True),
        evicted=Style(reverse=True, dim=True),
        grey=Style(dim=True),
    )


def _ansi_theme(name: str) -> Theme:
    default, accent = "ansi_default", "ansi_default" if name == "none" else "ansi_cyan"
    return Theme(
        name=name,
        ansi=True,
        primary=accent,
        secondary=default,
        accent=accent,
        warning=default if name == "none" else "ansi_yellow",
        error=default if name == "none" else "ansi_red",
        success=default if name == "none" else "ansi_green",
        foreground=default,
        background=default,
        surface=default,
        panel=default,
        boost=default,
        variables={
            "border": accent,
            "border-blurred": default if name == "none" else "ansi_bright_black",
            "ansi-background": "ansi_black",
            "ansi-foreground": "ansi_white",
            "block-cursor-foreground": "ansi_black",
            "block-cursor-background": "ansi_white",
            "input-cursor-background": "ansi_white",
            "input-cursor-foreground": "ansi_black",
        },
    )


def make_palettes() -> dict[str, Palette]:
    """By the name that `--theme` takes."""
    return {
        "dark": _true_colour("dark", _DARK, dark=True),
        "light": _true_colour("light", _LIGHT, dark=False),
        "contrast": _true_colour("contrast", _CONTRAST, dark=True),
        "16": _sixteen_colours(),
        "none": _no_colours(),
    }


def choose_theme(environ: Mapping[str, str]) -> str:
    """The theme for a terminal that these variables describe, when nobody chose one."""
    if environ.get("NO_COLOR"):
        return "none"
    term = environ.get("TERM", "")
    has_many = environ.get("COLORTERM", "") in ("truecolor", "24bit") or "256color" in term or "direct" in term
    if not has_many:
        return "16"
    # Some terminals say "foreground;background" there, as numbers of the sixteen colours; 7 and 15 are white.
    return "light" if environ.get("COLORFGBG", "").rpartition(";")[2] in ("7", "15") else "dark"
