"""Which characters stand for what, in Unicode and for terminals that know ASCII alone.

Owns characters only. Colours are `themes.py`'s; what a state means is said on the help screen, from the same names.
"""

from dataclasses import dataclass

# `S` marks shared blocks, so no sequence gets it.
SHARED = "S"
ENDED = "?"


@dataclass(frozen=True, slots=True)
class Glyphs:
    """One set of characters; those that stand for a cell are one cell wide.

    Attributes:
        cached: four characters, from used just now to used long ago.
        many: a sequence beyond those that have a letter of their own.
        bar: a bar's cell from empty to full, in equal steps.
        level: a cell of a graph or of a run of blocks, from nothing to full height, in equal steps.
    """

    cached: str
    free: str
    many: str
    missing: str
    separator: str
    bar: str
    bar_ends: str
    level: str
    ellipsis: str
    degree: str
    enter: str
    plus_minus: str
    arrow: str
    live: str
    lost: str
    paused: str
    recording: str
    warning: str
    up: str
    down: str
    selected: str
    branch: str
    last_branch: str
    trunk: str
    queued: str
    prefill: str
    decode: str
    preempted: str
    open_tail: str
    is_unicode: bool

    def fits(self, encoding: str | None) -> bool:
        """Whether a stream of that encoding can carry every character."""
        try:
            "".join(getattr(self, name) for name in self.__slots__ if name != "is_unicode").encode(encoding or "ascii")
        except (UnicodeEncodeError, LookupError):
            return False
        return True


UNICODE = Glyphs(
    cached="▒▒░░",
    free="·",
    many="■",
    missing="–",
    separator=" · ",
    bar=" ▏▎▍▌▋▊▉█",
    bar_ends="▕▏",
    level=" ▁▂▃▄▅▆▇█",
    ellipsis="…",
    degree="°",
    enter="⏎",
    plus_minus="±",
    arrow="→",
    live="●",
    lost="○",
    paused="⏸",
    recording="◉",
    warning="⚠",
    up="▴",
    down="▾",
    selected="▸",
    branch="├─",
    last_branch="└─",
    trunk="│ ",
    queued="┄",
    prefill="▒",
    decode="█",
    preempted="▚",
    open_tail="▁",
    is_unicode=True,
)
ASCII = Glyphs(
    cached=":::,",
    free=".",
    many="#",
    missing="-",
    separator=", ",
    bar=" #",
    bar_ends="[]",
    level=" .:-=+*#",
    ellipsis="~",
    degree="",
    enter="enter",
    plus_minus="+-",
    arrow="->",
    live="*",
    lost="o",
    paused="=",
    recording="@",
    warning="!",
    up="^",
    down="v",
    selected=">",
    branch="|-",
    last_branch="`-",
    trunk="| ",
    queued="-",
    prefill="%",
    decode="#",
    preempted="x",
    open_tail="_",
    is_unicode=False,
)


def glyphs_for(encoding: str | None, *, ascii_only: bool = False) -> Glyphs:
    return UNICODE if not ascii_only and UNICODE.fits(encoding) else ASCII
