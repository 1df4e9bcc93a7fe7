"""What the box uses: the counters of the GPU and of the processor's packages where they can be read, else the stated
wattage.

Owns the sum and the word for where it comes from. The counters are `telemetry.py`'s.
"""

from pagedd.daemon.telemetry import Figures

_COUNTERS = {"gpu_energy_joules": "gpu", "cpu_energy_joules": "cpu"}
# A driver may take its time. What a counter missed is in its next reading, unless it stays away for so long.
_GAP_S = 10.0


class EnergyMeter:
    """Adds up what the counters tell.

    Attributes:
        source: `gpu`, `cpu`, `gpu+cpu` or `stated`; empty while nothing is known.
    """

    def __init__(self, stated_watts: float | None, now_s: float) -> None:
        self.source = ""
        self._stated_watts = stated_watts
        self._last: dict[str, float] = {}
        self._advanced_s = now_s
        self._measured_s: float | None = None

    def advance(self, figures: Figures, now_s: float) -> float:
        """Joules since the last call; 0 when they are not known, and then `source` is empty."""
        elapsed_s, self._advanced_s = now_s - self._advanced_s, now_s
        counters = {name: value for name in _COUNTERS if (value := figures.get(name)) is not None}
        if counters:
            self.source = "+".join(_COUNTERS[name] for name in counters)
            self._measured_s = now_s
            # A driver that was loaded anew counts from 0.
            joules = sum(max(0.0, value - self._last.get(name, value)) for name, value in counters.items())
            self._last |= counters
            return joules
        if self._measured_s is not None and now_s - self._measured_s < _GAP_S:
            return 0.0
        self._last.clear()
        self.source = "" if self._stated_watts is None else "stated"
        return (self._stated_watts or 0.0) * elapsed_s
