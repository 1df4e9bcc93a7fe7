"""What happened, a line each: when, of which kind, to which request, and why; and one event with all its words."""

import time
from collections.abc import Iterable
from textwrap import wrap as wrap_words

from pagedd.client.stats_frame import Event
from pagedd.tui.glyphs import Glyphs
from pagedd.tui.line import Line, cut, fit, printable
from pagedd.tui.state import NOTE

KINDS = ("preemption", "eviction", "refusal", "cancel", "priority", "engine", "model", "reload")
# Red is for what a person should act on; the rest is the engine doing its work.
_ROLES = {"refusal": "warn", "engine": "bad", "preemption": "accent", "cancel": "accent", "priority": "accent"}
_GOOD_NEWS = ("ready", "connected again")


def event_line(event: Event, width: int, glyphs: Glyphs) -> Line:
    """One event in exactly `width` cells. The time is this machine's."""
    clock = time.strftime("%H:%M:%S", time.localtime(event.time_s))
    head = [(clock, "dim"), ("  ", ""), (fit(printable(event.kind), 10), _role(event)), ("  ", "")]
    used = 8 + 2 + 10 + 2
    if width >= 60:
        head += [(fit(printable(event.request_id) or glyphs.free, 8), "" if event.request_id else "faint"), ("  ", "")]
        used += 10
    return [*head, (fit(printable(event.reason), max(0, width - used), glyphs.ellipsis), "")]


def event_lines(event: Event, width: int, glyphs: Glyphs) -> list[Line]:
    """All of one event in lines at most `width` wide."""
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.time_s))
    seen_by = "seen by pagetop" if event.seq == NOTE else f"number {event.seq}"
    lines: list[Line] = [
        [
            (printable(event.kind), _role(event)),
            (glyphs.separator, "faint"),
            (clock, ""),
            (glyphs.separator, "faint"),
            (seen_by, "dim"),
        ]
    ]
    if event.request_id:
        lines.append([("request ", "dim"), (printable(event.request_id), "")])
    reason: list[Line] = [[(text, "")] for text in wrap_words(printable(event.reason), max(1, width))]
    return [*(cut(line, width) for line in lines), [], *reason]


def _role(event: Event) -> str:
    return "ok" if event.reason.startswith(_GOOD_NEWS) else _ROLES.get(event.kind, "")


def matching(events: Iterable[Event], kind: str | None, words: str) -> list[Event]:
    """The events of a kind (None is all) in which every word of a filter occurs, newest first."""
    wanted = words.lower().split()
    found = [
        event
        for event in events
        if (kind is None or event.kind == kind)
        and all(word in f"{event.kind} {event.request_id} {event.reason}".lower() for word in wanted)
    ]
    return found[::-1]
