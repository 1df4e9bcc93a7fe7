"""How fast this box may compute now, by its battery and its heat, as Linux tells of them in /sys.

Owns what is read there and the rule; a machine that does not tell is on mains and cool. `pace.py` does the pacing.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pagedd.daemon.config import DaemonConfig

SYSFS = Path("/sys/class")
# A machine that has cooled below its limit by so much is cool again.
HYSTERESIS_C = 5.0


class Speed(NamedTuple):
    """`tokens_per_second` None is as fast as it goes; `reason` says in words why not."""

    tokens_per_second: float | None
    reason: str = ""


class Power:
    """Read by one thread at a time."""

    def __init__(self, config: DaemonConfig, sysfs: Path = SYSFS) -> None:
        self._config = config
        self._sysfs = sysfs
        self._is_hot = False

    @property
    def is_limited(self) -> bool:
        """Whether the settings limit anything."""
        config = self._config
        limits = (config.max_tokens_per_second, config.max_tokens_per_second_on_battery)
        return any(limit is not None for limit in limits) or config.max_tokens_per_second_when_hot is not None

    def speed(self) -> Speed:
        """The least of what holds now."""
        config = self._config
        speeds = [Speed(config.max_tokens_per_second, "as configured")]
        if self.is_on_battery():
            speeds.append(Speed(config.max_tokens_per_second_on_battery, "on battery"))
        hottest = self.hottest_c()
        limit_c = config.hot_celsius - (HYSTERESIS_C if self._is_hot else 0.0)
        self._is_hot = hottest is not None and hottest >= limit_c
        if self._is_hot:
            speeds.append(Speed(config.max_tokens_per_second_when_hot, f"{config.hot_celsius:g} °C were reached"))
        limited = [speed for speed in speeds if speed.tokens_per_second is not None]
        return min(limited, key=lambda speed: speed.tokens_per_second or 0.0) if limited else Speed(None)

    def is_on_battery(self) -> bool:
        """Whether a battery of the machine itself discharges, and no mains is on."""
        kinds = {folder: _text(folder / "type") for folder in self._folders("power_supply")}
        if any(kind in ("Mains", "USB") and _text(folder / "online") == "1" for folder, kind in kinds.items()):
            return False
        # A mouse has a battery too, of scope Device.
        batteries = [
            folder for folder, kind in kinds.items() if kind == "Battery" and _text(folder / "scope") != "Device"
        ]
        return any(_text(folder / "status") == "Discharging" for folder in batteries)

    def hottest_c(self) -> float | None:
        """Of all thermal zones; None where there are none."""
        readings = [
            _number(folder / "temp") for folder in self._folders("thermal") if folder.name.startswith("thermal_")
        ]
        return max((reading / 1000 for reading in readings if reading is not None), default=None)

    def _folders(self, kind: str) -> Iterator[Path]:
        try:
            yield from sorted((self._sysfs / kind).iterdir())
        except OSError:
            return


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> float | None:
    try:
        return float(_text(path))
    except ValueError:
        return None
