"""What the processor's packages use, by Linux's powercap files (Intel's RAPL; AMD's look the same).

Since 2020 the files are root's alone unless the machine's owner opens them; without them there is no figure.
"""

import time
from pathlib import Path

from pagedd.daemon.gpus import reading

_FOLDER = Path("/sys/class/powercap")


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
        for i, package in enumerate(self._packages):
            energy_uj, last_uj = _read(package / "energy_uj"), self._last[i]
            if energy_uj is not None and last_uj is not None:
                # The counter wraps within minutes under load.
                wraps = energy_uj < last_uj
                used_uj += energy_uj - last_uj + wraps * (_read(package / "max_energy_range_uj") or 0)
            self._last[i] = energy_uj
        self._joules += used_uj / 1e6
        elapsed_s, self._last_s = now_s - self._last_s, now_s
        return self._joules, used_uj / 1e6 / elapsed_s if has_last and elapsed_s > 0 else None


def _read(file: Path) -> int | None:
    text = reading(file.read_text)
    return int(text) if text is not None and text.strip().isdecimal() else None
