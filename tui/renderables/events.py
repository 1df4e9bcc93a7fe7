"""What happened, a line each: when, of which kind, to which request, and why."""

import time
from collections.abc import Iterable

from pagedd.client.protocol import Event
from pagedd.tui.glyphs import Glyphs
from pagedd.tui.line import Line, fit, printable

KINDS = ("preemption", "eviction", "refusal", "cancel", "engine", "model")
# Red is for what a person should act on; the rest is the engine doing its work.
_ROLES = {"refusal": "warn", "engine": "bad", "preemption": "accent", "cancel": "accent"}
_GOOD_NEWS = ("ready", "connected again")


def event_line(event: Event, width: int, glyphs: Glyphs) -> Line:
    """One event in exactly `width` cells. The time is this machine's."""
    clock = time.strftime("%H:%M:%S", time.localtime(event.time_s))
    role = "ok" if event.reason.startswith(_GOOD_NEWS) else _ROLES.get(event.kind, "")
    head = [(clock, "dim"), ("  ", ""), (fit(printable(event.kind), 10), role), ("  ", "")]
    used = 8 + 2 + 10 + 2
    if width >= 60:
        head += [(fit(printable(event.request_id) or glyphs.free, 8), "" if event.request_id else "faint"), ("  ", "")]
        used += 10
    return [*head, (fit(printable(event.reason), max(0, width - used), glyphs.ellipsis), "")]


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
