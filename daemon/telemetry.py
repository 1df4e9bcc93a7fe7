"""What the processes and the device are doing, from psutil and NVML: figures for `/metrics` and the stats frames.

Every figure may be None, which is "not available" and never an error: a field that a card or a container does not have
costs that field alone. The engine's own figures are in `pagedd.engine.stats`.
"""

import logging
import math
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import psutil
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

log = logging.getLogger(__name__)

Figures = dict[str, float | None]

# CPU shares over a shorter time are noise, and several readers may ask at once.
_MIN_INTERVAL_S = 0.2


class Nvml(Protocol):
    """The part of the module `pynvml` that is used; tests pass a fake."""

    def nvmlInit(self) -> None: ...
    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any: ...
    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any: ...
    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any: ...
    def nvmlDeviceGetPowerUsage(self, handle: Any) -> int: ...
    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int) -> int: ...
    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any) -> int: ...


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


class Telemetry:
    """Reads all figures when it is asked, at most five times a second, and does nothing in between."""

    def __init__(self, nvml: Nvml | None = None) -> None:
        """`nvml` replaces the real one, which is loaded when the first CUDA engine is seen."""
        self._nvml = nvml
        self._front = ProcessMeter()
        self._engine: ProcessMeter | None = None
        self._engine_pid: int | None = None
        self._gpu: GpuMeter | None = None
        self._read_s = -math.inf
        self._last: Figures = {}

    def figures(self, engine_pid: int | None, device: str | None) -> Figures:
        """The newest reading. `device` is what the engine chose (`cpu`, `cuda:0`), None while there is no engine.

        Names end in their unit: `_bytes`, `_watts`, `_celsius`, `_joules`, `_ratio` (0–1), `_cores` (1.0 = one busy).
        """
        now_s = time.monotonic()
        if now_s - self._read_s >= _MIN_INTERVAL_S or engine_pid != self._engine_pid:
            self._read_s, self._last = now_s, self._read(engine_pid, device)
        return self._last

    def _read(self, engine_pid: int | None, device: str | None) -> Figures:
        if engine_pid != self._engine_pid:
            self._engine_pid = engine_pid
            self._engine = ProcessMeter(engine_pid) if engine_pid is not None else None
        front_cores, front_rss = self._front.read()
        engine_cores, engine_rss = self._engine.read() if self._engine is not None else (None, None)
        memory = _reading(psutil.virtual_memory)
        cpu_percent = _reading(psutil.cpu_percent)
        return {
            "front_cpu_cores": front_cores,
            "front_rss_bytes": front_rss,
            "engine_cpu_cores": engine_cores,
            "engine_rss_bytes": engine_rss,
            "host_cpu_ratio": None if cpu_percent is None else cpu_percent / 100,
            "host_memory_total_bytes": None if memory is None else float(memory.total),
            "host_memory_available_bytes": None if memory is None else float(memory.available),
            **self._gpu_figures(device),
        }

    def _gpu_figures(self, device: str | None) -> Figures:
        index = _cuda_index(device)
        if index is None:
            return dict.fromkeys(GpuMeter.NAMES)
        if self._gpu is None or self._gpu.index != index:
            self._nvml = self._nvml or _load_nvml()
            self._gpu = GpuMeter(self._nvml, index)
        return self._gpu.read()


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
                yield CounterMetricFamily("pagedd:energy_joules", text, value=value)
            else:
                yield GaugeMetricFamily(f"pagedd:{name}", text, value=value)

    def describe(self) -> Iterator[Metric]:
        """Nothing, so that registering reads nothing."""
        return iter(())


class GpuMeter:
    """One NVIDIA device through NVML. Any call may fail, and then its figures alone are None."""

    NAMES = (
        "gpu_utilization_ratio",
        "gpu_memory_used_bytes",
        "gpu_memory_total_bytes",
        "gpu_power_watts",
        "gpu_temperature_celsius",
        "gpu_energy_joules",
    )

    def __init__(self, nvml: Nvml | None, index: int) -> None:
        self.index = index
        self._nvml = nvml
        self._handle = _reading(lambda: nvml.nvmlDeviceGetHandleByIndex(index)) if nvml is not None else None

    def read(self) -> Figures:
        nvml, handle = self._nvml, self._handle
        if nvml is None or handle is None:
            return dict.fromkeys(self.NAMES)
        utilization = _reading(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        memory = _reading(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        total = _number(getattr(memory, "total", None))
        power = _number(_reading(lambda: nvml.nvmlDeviceGetPowerUsage(handle)))
        energy = _number(_reading(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle)))
        utilization_percent = _number(utilization, 100)
        return {
            "gpu_utilization_ratio": None if utilization_percent is None else utilization_percent / 100,
            "gpu_memory_used_bytes": _number(getattr(memory, "used", None), total),
            "gpu_memory_total_bytes": total,
            "gpu_power_watts": None if power is None else power / 1000,
            "gpu_temperature_celsius": _number(_reading(lambda: nvml.nvmlDeviceGetTemperature(handle, 0))),
            "gpu_energy_joules": None if energy is None else energy / 1000,
        }


def _load_nvml() -> Nvml | None:
    try:
        import pynvml  # type: ignore[import-untyped]

        pynvml.nvmlInit()
    except Exception as error:
        # No driver, another driver, no permission: each has an exception of its own, and none concerns serving.
        log.info("GPU figures are not available: %s", error)
        return None
    nvml: Nvml = pynvml
    return nvml


def _cuda_index(device: str | None) -> int | None:
    match = re.fullmatch(r"cuda(?::(\d+))?", device or "")
    return int(match[1] or 0) if match else None


def _reading(read: Callable[[], Any]) -> Any:
    """What `read` returns, or None when this machine cannot tell: telemetry never stops the daemon."""
    try:
        return read()
    except Exception as error:
        log.debug("a figure is not available: %s", error)
        return None


def _number(value: object, limit: float | None = None) -> float | None:
    """A plausible figure as a float. NVML gives 2^32 − 1 or 2^64 − 1 for what it does not know."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    if value < 0 or value in (2**32 - 1, 2**64 - 1) or (limit is not None and value > limit):
        return None
    return float(value)
