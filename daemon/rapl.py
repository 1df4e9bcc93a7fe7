"""What the processor's packages use, by Linux's powercap files (Intel's RAPL; AMD's look the same).

Since 2020 the files are root's alone unless the machine's owner opens them; without them there is no figure.
"""

import time
from pathlib import Path

from pagedd.daemon.gpus import reading

_FOLDER = Path("/sys/class/powercap")
_MAX_PACKAGE_WATTS = 2000


class Rapl:
    """Sums the packages. Energy counts from the first reading; the power is the mean since the reading before."""

    def __init__(self, folder: Path = _FOLDER) -> None:
        # `intel-rapl:0` is a package, `intel-rapl:0:0` a part of it.
        packages = (zone for zone in folder.glob("intel-rapl:*") if zone.name.count(":") == 1)
        self._packages = [package for package in sorted(packages) if _read(package / "energy_uj") is not None]
        self._last: list[int | None] = [None] * len(self._packages)
        self._last_s = 0.0
        self._joules = 0.0

    def read(self) -> tuple[float | None, float | None]:
        """(J since the first reading, W since the one before); the first reading has no power."""
        if not self._packages:
            return None, None
        now_s, used_uj = time.monotonic(), 0
        has_last = self._last_s > 0
        elapsed_s, self._last_s = now_s - self._last_s, now_s
        for i, package in enumerate(self._packages):
            energy_uj, last_uj = _read(package / "energy_uj"), self._last[i]
            if energy_uj is None:
                continue  # what was missed is in the next reading
            if last_uj is not None:
                used_uj += _used_uj(package, last_uj, energy_uj, elapsed_s)
            self._last[i] = energy_uj
        self._joules += used_uj / 1e6
        return self._joules, used_uj / 1e6 / elapsed_s if has_last and elapsed_s > 0 else None


def _used_uj(package: Path, last_uj: int, energy_uj: int, elapsed_s: float) -> int:
    """The counter wraps within minutes under load. One that began anew, as after a suspend, tells nothing."""
    if energy_uj >= last_uj:
        return energy_uj - last_uj
    used_uj = energy_uj - last_uj + (_read(package / "max_energy_range_uj") or 0)
    return used_uj if 0 <= used_uj <= _MAX_PACKAGE_WATTS * 1e6 * max(1.0, elapsed_s) else 0


def _read(file: Path) -> int | None:
    text = reading(file.read_text)
    return int(text) if text is not None and text.strip().isdecimal() else None
