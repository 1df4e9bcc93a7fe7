"""When an engine that ended is followed by another, on which device, and when that is pointless.

Owns the rules and their clock; `engine_lives.py` starts processes by them. Before the first success somebody waits for
an answer, so loading is given up after a few tries. Afterwards it must come back by itself, however long that takes.

A device may be away for a while: its driver starts late, it is lost and comes back after a suspend, or others have its
memory. It gets `DEVICE_PATIENCE_S`; then, where that is configured, the CPU serves in its place until the daemon is
started again. In place of a device that can never serve it does so at once.
"""

import time
from collections.abc import Callable
from dataclasses import replace

from pagedd.engine.config import EngineConfig

DEVICE_PATIENCE_S = 60.0
MAX_FAILED_LOADS = 3

# What may pass by itself, and on another device is none.
_AWAY_CODES = frozenset({"device_unavailable", "out_of_memory", "no_kv_memory"})
# What the CPU can serve in spite of, where it may.
FALLBACK_CODES = _AWAY_CODES | {"unsupported_device"}
# Starting again would end the same way. Once it has served, it did not always: files come back, settings are mended.
_PERMANENT_CODES = frozenset(
    {
        "invalid_setting",
        "unknown_setting",
        "unsupported_model",
        "unsupported_device",
        "model_unavailable",
        "checksum_mismatch",
        "poor_kv_quality",
    }
)
_FIRST_DELAY_S = 0.25
_MAX_DELAY_S = 30.0
# An engine that served this long has earned a quick restart.
_STABLE_S = 60.0


class RestartPolicy:
    """The life of engines so far.

    Attributes:
        has_fallen_back: the CPU serves in place of the configured device.
    """

    def __init__(self, *, can_fall_back: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self.has_fallen_back = False
        self._can_fall_back = can_fall_back
        self._clock = clock
        self._has_served = False
        self._num_failed_loads = 0
        self._device_away_since_s: float | None = None
        self._delay_s = _FIRST_DELAY_S

    def serves(self) -> None:
        """An engine is ready; from now on the daemon never gives up."""
        self._has_served = True
        self._num_failed_loads = 0
        self._device_away_since_s = None

    def after_serving(self, seconds: float) -> float:
        """Seconds to wait before the engine that follows one which served so long, and ended by itself."""
        self.serves()
        if seconds > _STABLE_S:
            self._delay_s = _FIRST_DELAY_S
        return self._next_delay()

    def after_failed_load(self, code: str | None) -> float | None:
        """Seconds to wait before the next try; `None`: another would end the same way. `code` says how it failed."""
        if code in _AWAY_CODES:
            return self._after_absence()
        self._device_away_since_s = None
        if code == "unsupported_device" and self._can_fall_back and not self.has_fallen_back:
            self.has_fallen_back = True
            return 0.0
        if code in _PERMANENT_CODES and not self._has_served:
            return None
        self._num_failed_loads += 1
        if not self._has_served and self._num_failed_loads >= MAX_FAILED_LOADS:
            return None
        return self._next_delay()

    def _after_absence(self) -> float | None:
        now = self._clock()
        if self._device_away_since_s is None:
            self._device_away_since_s = now
        if now - self._device_away_since_s < DEVICE_PATIENCE_S:
            return self._next_delay()
        if self._can_fall_back and not self.has_fallen_back:
            self.has_fallen_back = True
            return 0.0
        return self._next_delay() if self._has_served else None

    def _next_delay(self) -> float:
        delay_s, self._delay_s = self._delay_s, min(2 * self._delay_s, _MAX_DELAY_S)
        return delay_s


def on_the_cpu(config: EngineConfig) -> EngineConfig:
    """The same on a CPU; what was meant for a card's memory and arithmetic is chosen anew."""
    return replace(
        config,
        device="cpu",
        dtype="auto",
        kv_cache_dtype="auto",
        kv_quality=None,
        num_blocks=None,
        gpu_memory_utilization=None,
        max_num_batched_tokens=None,
        async_scheduling="auto",
    )
