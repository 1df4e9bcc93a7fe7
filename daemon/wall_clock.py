"""The wall clock, which is set by others, forwards and backwards: the daemon reads it here and nowhere else.

It is for people to read, in logs, events and traces. What is decided by time, and how long something took, is
`time.monotonic`'s; ruff refuses `time.time` and `datetime.now` everywhere but here and in `engine/kv/use_stamps.py`,
whose times of files make an order of their own. That clock stands still while the machine is suspended, which is right
for limits on work, and no matter for what is forgotten after minutes.
"""

import time
from datetime import UTC, datetime


def unix_s(monotonic_s: float | None = None) -> float:
    """Unix time of a moment of `time.monotonic`, or of now, by what the clock says now."""
    ago_s = 0.0 if monotonic_s is None else time.monotonic() - monotonic_s
    return time.time() - ago_s  # noqa: TID251 (this is the place)


def utc_now() -> datetime:
    return datetime.fromtimestamp(unix_s(), UTC)


def local_now() -> datetime:
    """Without a time zone, as templates expect it."""
    return datetime.fromtimestamp(unix_s())
