"""How long the engine process has been silent, and when that is too long.

The engine's own loop speaks: after each step, now and then while it is idle, and as its load gets on. So silence means
that a step or a load does not end. Owns the limits and their clock; `engine_child.py` asks, and acts on the answer.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from pagedd.daemon.config import DaemonConfig
from pagedd.daemon.engine_link import IDLE_INTERVAL_S

TICK_S = 0.5
# A step that takes this share of its limit is told to clients, who may then wait with the next request.
_STALL_SHARE = 0.25
# With a small limit, the share alone would take an idle engine for one that stalls.
_MIN_STALLED_S = 2.5 * IDLE_INTERVAL_S
# A front that was itself held up has not seen what the engine said meanwhile.
_MAX_TICK_S = 2 * TICK_S


@dataclass(frozen=True, slots=True, kw_only=True)
class SilenceLimits:
    """Seconds without a word: of a step before it is `stalled` and before it is `hung`, and of a load."""

    stalled_s: float = 30.0
    hung_s: float = 120.0
    load_s: float = 1800.0

    @classmethod
    def of(cls, config: DaemonConfig) -> "SilenceLimits":
        return cls(
            stalled_s=max(_MIN_STALLED_S, _STALL_SHARE * config.step_timeout_seconds),
            hung_s=config.step_timeout_seconds,
            load_s=config.load_timeout_seconds,
        )


class Progress(Enum):
    ADVANCING = "advancing"
    STALLED = "stalled"
    HUNG = "hung"


class EngineWatch:
    """One engine process. `tick` is called every `TICK_S`, `heard` with each of its messages."""

    def __init__(self, limits: SilenceLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._last_tick_s = clock()
        self.silent_s = 0.0

    def heard(self) -> None:
        self.silent_s = 0.0

    def tick(self, *, is_loading: bool) -> Progress:
        """How the engine gets on. Only time in which this process runs as well counts against it."""
        now_s = self._clock()
        self.silent_s += min(now_s - self._last_tick_s, _MAX_TICK_S)
        self._last_tick_s = now_s
        if self.silent_s >= (self._limits.load_s if is_loading else self._limits.hung_s):
            return Progress.HUNG
        if not is_loading and self.silent_s >= self._limits.stalled_s:
            return Progress.STALLED
        return Progress.ADVANCING
