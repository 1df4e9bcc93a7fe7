"""The line on top: what is served, on what, since when; and whether what is on screen still holds."""

from dataclasses import dataclass

from pagedd.client.percent import percent
from pagedd.client.stats_frame import StatsFrame
from pagedd.tui.glyphs import Glyphs
from pagedd.tui.line import Line, Span, join, join_as_fits, printable, spread, width_of
from pagedd.tui.renderables import numbers
from pagedd.tui.state import STALE_S, State

# From there on a person sees that the picture does not move, and is told that it need not.
_SLOW_S = 1.0


@dataclass(frozen=True, slots=True)
class Modes:
    """What the viewer itself is doing. `source` is "" for a daemon, else what is shown instead of one."""

    source: str = ""
    is_paused: bool = False
    is_recording: bool = False


def header_line(state: State, modes: Modes, now_s: float, width: int, glyphs: Glyphs) -> Line:
    right = _status(state, modes, now_s, width, glyphs)
    frame = state.frame
    left: list[Span] = [(" pagetop ", "title")]
    if frame is not None:
        left.append((" ", ""))
        room = width - width_of(left) - width_of(right) - 1
        separator = glyphs.separator, "faint"
        # With the note on its cache or without it, whichever fills the room better.
        lines: list[Line] = [join_as_fits(_about(state, frame, cache), separator, room) for cache in _cache(frame)]
        fullest: Line = max(lines, key=width_of)
        left += fullest
    return spread(left, right, width)


def _about(state: State, frame: StatsFrame, cache: str) -> list[Line]:
    """What is served, the most important first."""
    parts: list[Line] = [
        [(printable(frame.model), "strong")],
        [(printable(frame.device), "")],
        [(f"block {state.pool.block_size}" if state.pool.block_size else "", "dim")],
        [(cache, "dim")],
        [(f"up {numbers.duration(frame.uptime_s)}", "dim")],
    ]
    parts = [part for part in parts if part[0][0]]
    if frame.state != "ready":
        parts.insert(0, [(printable(frame.state_in_words), "warn")])
    return parts


def _cache(frame: StatsFrame) -> list[str]:
    """Its form, with and without the share of predictions in which that was measured to agree with 16 bits."""
    form = f"kv {printable(frame.kv_cache_dtype)}" if frame.kv_cache_dtype else ""
    agreement = frame.figures.get("kv_agreement_ratio")
    if not form or agreement is None:
        return [form]
    return [f"{form} ({percent(agreement, decimals=1)}% as 16 bits)", form]


def _status(state: State, modes: Modes, now_s: float, width: int, glyphs: Glyphs) -> Line:
    parts: list[Line] = []
    if modes.source:
        parts.append([(modes.source, "dim")])
    if modes.is_recording:
        parts.append([(f"{glyphs.recording} recording", "bad")])
    if modes.is_paused:
        parts.append([(f"{glyphs.paused} paused", "warn")])
    parts.append(_link(state, modes, now_s, width, glyphs))
    return [*join(parts, ("  ", "")), (" ", "")]


def _link(state: State, modes: Modes, now_s: float, width: int, glyphs: Glyphs) -> Line:
    age = f"{numbers.duration(state.age_s(now_s))} old" if state.frame is not None else ""
    link = state.link
    if link.state == "lost":
        text = f"{glyphs.lost} {'disconnected, retrying' if width >= 60 or not age else 'lost'}"
        return [(f"{text}{glyphs.separator}{age}" if age else text, "bad")]
    if link.state == "connecting":
        return [(f"{glyphs.lost} connecting", "dim")]
    if link.state == "ended":
        return [(f"{glyphs.lost} the recording is over", "dim")]
    is_timeless = modes.is_paused or bool(modes.source)
    if state.is_stale(state.received_s if is_timeless else now_s):
        return [(f"{glyphs.lost} {'held' if state.is_held else age}", "bad")]
    if state.overdue_s(now_s) > STALE_S or modes.is_paused:
        return [(f"{glyphs.live} {age}", "warn")]
    interval_s = state.frame.interval_s if state.frame is not None else 0.0
    pace = f", every {interval_s:.0f} s" if interval_s >= _SLOW_S and width >= 60 else ""
    return [(f"{glyphs.live} live{pace}", "ok")]
