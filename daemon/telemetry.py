"""What the processes, the host and its GPUs are doing: figures for `/metrics`, a `Machine` for the stats frames.

Every figure may be None, which is "not available" and never an error: a field that a card or a container does not have
costs that field alone. What NVML tells is `gpus.py`'s; the engine's own figures are in `pagedd.engine.stats`.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import psutil
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pagedd.client.stats_frame import Device, Machine
from pagedd.daemon.gpus import GpuMeter, Nvml, cuda_index, load_nvml, num_gpus, number, reading
from pagedd.daemon.rapl import Rapl

Figures = dict[str, float | None]

# CPU shares over a shorter time are noise, and several readers may ask at once.
_MIN_INTERVAL_S = 0.2
_STALE_S = 2.0
# Reading every sensor of a board opens dozens of files.
_SLOW_INTERVAL_S = 2.0
# The sensors of processors, by the names of their drivers in Linux.
_CPU_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "cpu-thermal", "soc_thermal")

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at everything. `figures` has the names that `/metrics` and the stats frames show."""

    figures: Figures = field(default_factory=dict)
    machine: Machine = field(default_factory=Machine)


class ProcessMeter:
    """CPU and memory of one process. CPU is a share of one core since the last reading, 1.0 = one core busy."""

    def __init__(self, pid: int | None = None) -> None:
        try:
            self._process: psutil.Process | None = psutil.Process(pid)
        except psutil.Error:
            self._process = None
        self.read()

    def read(self) -> tuple[float | None, float | None]:
        """(CPU cores in use, resident bytes)."""
        if self._process is None:
            return None, None
        try:
            with self._process.oneshot():
                return self._process.cpu_percent() / 100, float(self._process.memory_info().rss)
        except psutil.Error:
            return None, None


class HostMeter:
    """CPU of the whole machine. psutil's own meter remembers for each thread apart, and readings come from several."""

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None
        self.cpu_percent()

    def cpu_percent(self) -> float | None:
        """0–100 of all cores together since the last call."""
        last, self._last = self._last, reading(self._times)
        if last is None or self._last is None:
            return None
        busy_s, total_s = self._last[0] - last[0], self._last[1] - last[1]
        # The kernel corrects its idle time afterwards, so that the busy share may come out a little under 0 or over 1.
        return 100 * min(1.0, max(0.0, busy_s / total_s)) if total_s > 0 else None

    @staticmethod
    def _times() -> tuple[float, float]:
        """(busy, all) seconds since boot. What guests used is counted as the host's already."""
        times = psutil.cpu_times()
        total_s = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        return total_s - times.idle - getattr(times, "iowait", 0.0), total_s


class Telemetry:
    """Reads everything when it is asked, at most five times a second, and does nothing in between.

    Any thread may ask. While one reads, the others get the reading before; when it reads for seconds, because a driver
    does not answer, there are no figures: old ones would pass for new.
    """

    def __init__(self, nvml: Nvml | None = None) -> None:
        """`nvml` replaces the real one, which is loaded when the first CUDA engine is seen."""
        self._nvml = nvml
        self._host = HostMeter()
        self._front = ProcessMeter()
        self._engine: ProcessMeter | None = None
        self._engine_pid: int | None = None
        self._gpus: list[GpuMeter] = []
        self._temperature_c = _Seldom(_cpu_temperature_c)
        self._rapl = Rapl()
        self._energy_rapl = Rapl()  # its own, since `_rapl` tells the mean power since its last reading
        self._reading = threading.Lock()
        self._began_s = self._read_s = -math.inf
        self._last = Reading()

    def read(self, engine_pid: int | None, device: str | None) -> Reading:
        """The newest reading. `device` is what the engine chose (`cpu`, `cuda:0`), None while there is no engine.

        Figures' names end in their unit: `_bytes`, `_watts`, `_celsius`, `_joules`, `_ratio` (0–1), `_cores` (1.0 = one
        busy).
        """
        now_s = time.monotonic()
        if not self._reading.acquire(blocking=False):
            return self._last if now_s - self._began_s < _STALE_S else Reading()
        try:
            if now_s - self._read_s >= _MIN_INTERVAL_S or engine_pid != self._engine_pid:
                self._began_s = now_s
                self._last, self._read_s = self._read(engine_pid, device), now_s
            return self._last
        finally:
            self._reading.release()

    def read_energy(self, device: str | None) -> Figures:
        """The counters of energy alone, which cost little to read. Nothing while another thread reads."""
        if not self._reading.acquire(blocking=False):
            return {}
        try:
            gpus = self._meters(device)
            return {
                "gpu_energy_joules": gpus[0].energy_joules() if gpus else None,
                "cpu_energy_joules": self._energy_rapl.read()[0],
            }
        finally:
            self._reading.release()

    def _read(self, engine_pid: int | None, device: str | None) -> Reading:
        if engine_pid != self._engine_pid:
            self._engine_pid = engine_pid
            self._engine = ProcessMeter(engine_pid) if engine_pid is not None else None
        front_cores, front_rss = self._front.read()
        engine_cores, engine_rss = self._engine.read() if self._engine is not None else (None, None)
        memory = reading(psutil.virtual_memory)
        total, available = number(getattr(memory, "total", None)), number(getattr(memory, "available", None))
        cpu_percent = self._host.cpu_percent()
        cpu_joules, cpu_watts = self._rapl.read()
        gpus = self._meters(device)
        devices = [gpu.read(engine_pid if gpu is gpus[0] else None) for gpu in gpus]
        return Reading(
            {
                "front_cpu_cores": front_cores,
                "front_rss_bytes": front_rss,
                "engine_cpu_cores": engine_cores,
                "engine_rss_bytes": engine_rss,
                "host_cpu_ratio": None if cpu_percent is None else cpu_percent / 100,
                "host_memory_total_bytes": total,
                "host_memory_available_bytes": available,
                "cpu_energy_joules": cpu_joules,
                **_gpu_figures(devices[0] if devices else Device(index=0)),
                "gpu_energy_joules": gpus[0].energy_joules() if gpus else None,
            },
            Machine(
                cpu_percent=cpu_percent,
                memory_used_bytes=None if total is None or available is None else total - available,
                memory_total_bytes=total,
                temperature_c=self._temperature_c.value(),
                power_w=cpu_watts,
                num_cores=psutil.cpu_count(),
                devices=devices,
            ),
        )

    def _meters(self, device: str | None) -> list[GpuMeter]:
        """Those of all GPUs, the engine's first; none while the engine runs on no GPU."""
        own = cuda_index(device)
        if own is None:
            return []
        if not self._gpus or self._gpus[0].index != own:
            self._nvml = self._nvml or load_nvml()
            others = (index for index in range(num_gpus(self._nvml)) if index != own)
            self._gpus = [GpuMeter(self._nvml, index) for index in (own, *others)]
        return self._gpus


class TelemetryCollector(Collector):
    """The same figures for Prometheus, as `pagedd:NAME`. "Not available" is no sample."""

    def __init__(self, figures: Callable[[], Figures]) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        for name, value in self._figures().items():
            if value is None:
                continue
            text = name.replace("_", " ") + "; see daemon/telemetry.py"
            if name == "gpu_energy_joules":
                # What the card has used since its driver was loaded: it only grows.
                yield CounterMetricFamily("pagedd:gpu_energy_joules", text, value=value)
            elif name == "cpu_energy_joules":
                yield CounterMetricFamily("pagedd:cpu_energy_joules", text, value=value)
            else:
                yield GaugeMetricFamily(f"pagedd:{name}", text, value=value)

    def describe(self) -> Iterator[Metric]:
        """Nothing, so that registering reads nothing."""
        return iter(())


class _Seldom(Generic[_Value]):
    """A reading that costs too much to be made each time."""

    def __init__(self, read: Callable[[], _Value]) -> None:
        self._read = read
        self._due_s = -math.inf
        self._last: _Value | None = None

    def value(self) -> _Value | None:
        if time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + _SLOW_INTERVAL_S
            self._last = self._read()
        return self._last


def _cpu_temperature_c() -> float | None:
    """The hottest sensor of the processor. Boards have others, of disks and radios, which say nothing here."""
    sensors: dict[str, list[Any]] = reading(lambda: psutil.sensors_temperatures()) or {}
    found = [number(sensor.current, 150) for name in _CPU_SENSORS for sensor in sensors.get(name, ())]
    return max((value for value in found if value is not None), default=None)


def _gpu_figures(device: Device) -> Figures:
    percent = device.utilization_percent
    return {
        "gpu_utilization_ratio": None if percent is None else percent / 100,
        "gpu_memory_used_bytes": device.memory_used_bytes,
        "gpu_memory_total_bytes": device.memory_total_bytes,
        "gpu_power_watts": device.power_w,
        "gpu_temperature_celsius": device.temperature_c,
    }
