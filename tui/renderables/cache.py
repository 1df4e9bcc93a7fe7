"""The KV cache in figures: a bar of used, cached and free blocks, and how well they are used."""

from pagedd.tui.glyphs import Glyphs
from pagedd.tui.line import Line, Span, cut, join, width_of, wrap
from pagedd.tui.renderables import numbers
from pagedd.tui.renderables.bars import stacked
from pagedd.tui.state import State

_SHARES = (
    ("used", "num_blocks_used", "bar"),
    ("cached", "num_blocks_cached", "bar.cached"),
    ("free", "num_blocks_free", "track"),
)


def cache_bar(state: State, width: int, glyphs: Glyphs) -> Line:
    """`4 096 blocks ▕████▓▓▓···▏  █ used 61 %  ▓ cached 22 %  · free 17 %`."""
    total = state.figure("num_blocks")
    looks = {"used": glyphs.bar[-1], "cached": glyphs.cached[0], "free": glyphs.free}
    shares = {label: _share(state.figure(name), total) for label, name, _ in _SHARES}
    head: list[Span] = [(numbers.count(total, 0, glyphs.missing), "strong"), (" blocks ", "dim")]
    tail: list[Span] = []
    for label, _, role in _SHARES:
        tail += [("  ", ""), (looks[label], role), (f" {label} ", "dim")]
        tail.append((numbers.whole_percent(shares[label], glyphs.missing), ""))
    room = width - width_of(head) - width_of(tail) - 2
    if room < 8:
        # Never half a number: rather no glyphs.
        percents = {label: numbers.whole_percent(share, glyphs.missing) for label, share in shares.items()}
        words = join([[(label, "dim"), (percent, "")] for label, percent in percents.items()], ("  ", ""))
        return next((line for line in ([*head, *tail], tail[1:]) if width_of(line) <= width), cut(words, width))
    parts = [(shares[label] or 0.0, looks[label], role) for label, _, role in _SHARES]
    inside = stacked(parts, room) if total else [(" " * room, "track")]
    return [*head, (glyphs.bar_ends[0], "frame"), *inside, (glyphs.bar_ends[1], "frame"), *tail]


def cache_figures(state: State, width: int, glyphs: Glyphs) -> list[Line]:
    """Fill, fragmentation, hits and evictions, on as few lines as they need."""
    missing = glyphs.missing
    evictions = state.rates["evictions"]
    fragmentation: list[Span] = [
        ("fragmentation ", "dim"),
        (numbers.percent(state.figure("fragmentation"), missing), ""),
    ]
    contiguous: list[Span] = [
        ("contiguous ", "dim"),
        (numbers.percent(state.figure("contiguous_fragmentation"), missing), ""),
    ]
    both: list[Span] = [*fragmentation, (" (", "dim"), *contiguous, (")", "dim")]
    parts: list[Line] = [
        [("slot fill ", "dim"), (numbers.percent(state.figure("slot_fill"), missing), "")],
        *([both] if width_of(both) <= width else [fragmentation, contiguous]),
        [
            ("prefix hits ", "dim"),
            (numbers.percent(state.figure("hit_rate"), missing), ""),
            (" of prompt tokens", "dim"),
        ],
        [("evicted ", "dim"), (f"{numbers.count(evictions, 5, missing)}/s", "warn" if evictions else "")],
    ]
    return [cut(line, width) for line in wrap(parts, width, "  ")]


def _share(part: float | None, total: float | None) -> float | None:
    return None if part is None or not total else part / total
