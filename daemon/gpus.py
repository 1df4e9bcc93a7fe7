"""NVIDIA GPUs as NVML tells of them. Any call may fail, on any card, and then its figures alone are None.

Owns what is asked and which answers are believed. When and for whom is `telemetry.py`'s.
"""

import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import psutil

from pagedd.client.stats_frame import Device

log = logging.getLogger(__name__)

MAX_OTHERS = 8
_CLOCK_SM = 1  # NVML_CLOCK_SM of nvml.h
_SENSOR_GPU = 0  # NVML_TEMPERATURE_GPU


class Nvml(Protocol):
    """The part of the module `pynvml` that is used; tests pass a fake."""

    def nvmlInit(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int: ...
    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any: ...
    def nvmlDeviceGetName(self, handle: Any) -> str | bytes: ...
    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any: ...
    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any: ...
    def nvmlDeviceGetPowerUsage(self, handle: Any) -> int: ...
    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int) -> int: ...
    def nvmlDeviceGetClockInfo(self, handle: Any, clock: int) -> int: ...
    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any) -> int: ...
    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> list[Any]: ...
    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: Any) -> list[Any]: ...


class GpuMeter:
    """One device, by NVML's index. Without NVML every figure is None."""

    def __init__(self, nvml: Nvml | None, index: int) -> None:
        self.index = index
        self._nvml = nvml
        self._handle: Any = None
        self._name = ""

    def read(self, engine_pid: int | None = None) -> Device:
        """All figures but the energy. `engine_pid` is given for the engine's own device, and left out of `others`."""
        nvml, handle = self._nvml, self._open()
        if nvml is None or handle is None:
            return Device(index=self.index)
        memory = reading(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        total = number(getattr(memory, "total", None))
        power_mw = number(reading(lambda: nvml.nvmlDeviceGetPowerUsage(handle)))
        return Device(
            index=self.index,
            name=self._name,
            utilization_percent=number(reading(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu), 100),
            memory_used_bytes=number(getattr(memory, "used", None), total),
            memory_total_bytes=total,
            power_w=None if power_mw is None else power_mw / 1000,
            temperature_c=number(reading(lambda: nvml.nvmlDeviceGetTemperature(handle, _SENSOR_GPU))),
            clock_mhz=number(reading(lambda: nvml.nvmlDeviceGetClockInfo(handle, _CLOCK_SM))),
            others=list(_others(self._processes(nvml, handle), engine_pid, total)),
        )

    def bytes_of(self, pid: int) -> float | None:
        """What a process holds here, its context and graphs included; None when its pid is another one to the driver,
        as in a container.
        """
        nvml, handle = self._nvml, self._open()
        if nvml is None or handle is None:
            return None
        processes = (process for process in self._processes(nvml, handle) if getattr(process, "pid", None) == pid)
        held = (number(getattr(process, "usedGpuMemory", None)) for process in processes)
        return max((num_bytes for num_bytes in held if num_bytes is not None), default=None)

    def energy_joules(self) -> float | None:
        """What the card has used since its driver was loaded."""
        nvml, handle = self._nvml, self._open()
        if nvml is None or handle is None:
            return None
        energy_mj = number(reading(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle)))
        return None if energy_mj is None else energy_mj / 1000

    def _open(self) -> Any:
        """The handle; tried again until it is there, since a driver may come late."""
        if self._handle is None and (nvml := self._nvml) is not None:
            self._handle = handle = reading(lambda: nvml.nvmlDeviceGetHandleByIndex(self.index))
            name = None if handle is None else reading(lambda: nvml.nvmlDeviceGetName(handle))
            # Older versions of the module give bytes.
            self._name = name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name or "")
        return self._handle

    @staticmethod
    def _processes(nvml: Nvml, handle: Any) -> Iterator[Any]:
        yield from reading(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle)) or ()
        yield from reading(lambda: nvml.nvmlDeviceGetGraphicsRunningProcesses(handle)) or ()


def num_gpus(nvml: Nvml | None) -> int:
    """0 when it cannot be told."""
    return int(number(reading(lambda: nvml.nvmlDeviceGetCount())) or 0) if nvml is not None else 0


def load_nvml() -> Nvml | None:
    try:
        import pynvml  # type: ignore[import-untyped]

        pynvml.nvmlInit()
    except Exception as error:
        # No driver, another driver, no permission: each has an exception of its own, and none concerns serving.
        log.debug("GPU figures are not available: %s", error)
        return None
    nvml: Nvml = pynvml
    return nvml


def freest_device(device: str, nvml: Nvml | None, environ: Mapping[str, str] = os.environ) -> str | None:
    """`cuda:N`, the card with the most free memory, where `device` leaves the choice; None where there is none to make.

    The engine could ask CUDA instead, at the price of a context of some hundred MiB on every card.
    """
    if device not in ("auto", "cuda") or "CUDA_VISIBLE_DEVICES" in environ or num_gpus(nvml) < 2:
        return None
    free: dict[int, float] = {}
    for index in range(num_gpus(nvml)):
        card = GpuMeter(nvml, index).read()
        if card.memory_total_bytes is not None and card.memory_used_bytes is not None:
            free[index] = card.memory_total_bytes - card.memory_used_bytes
    return f"cuda:{max(free, key=lambda index: free[index])}" if free else None


def cuda_index(device: str | None) -> int | None:
    """1 of `cuda:1`; None for what is no CUDA device."""
    match = re.fullmatch(r"cuda(?::(\d+))?", device or "")
    return int(match[1] or 0) if match else None


def reading(read: Callable[[], Any]) -> Any:
    """What `read` returns, or None when this machine cannot tell: telemetry never stops the daemon."""
    try:
        return read()
    except Exception as error:
        log.debug("a figure is not available: %s", error)
        return None


def number(value: object, limit: float | None = None) -> float | None:
    """A plausible figure as a float. NVML gives 2^32 − 1 or 2^64 − 1 for what it does not know."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    if value < 0 or value in (2**32 - 1, 2**64 - 1) or (limit is not None and value > limit):
        return None
    return float(value)


def _others(
    processes: Iterable[Any], engine_pid: int | None, total: float | None
) -> Iterator[tuple[str, float | None]]:
    """Programs and what they hold, most first. One that both computes and draws is listed twice by NVML.

    Nobody when `engine_pid`, which must be there, is not: pids are then those of another namespace, as in a container,
    and the engine itself would pass for somebody else.
    """
    by_pid: dict[int, float | None] = {}
    for process in processes:
        pid, used = getattr(process, "pid", None), number(getattr(process, "usedGpuMemory", None), total)
        if isinstance(pid, int):
            by_pid[pid] = max((held for held in (by_pid.get(pid), used) if held is not None), default=None)
    if engine_pid is not None:
        if engine_pid not in by_pid:
            return
        del by_pid[engine_pid]
    by_name: dict[str, float | None] = {}
    for pid, used in by_pid.items():
        name = _program(pid)
        known = [held for held in (by_name.get(name), used) if held is not None]
        by_name[name] = sum(known) if known else None
    yield from sorted(by_name.items(), key=lambda item: -(item[1] or 0.0))[:MAX_OTHERS]


def _program(pid: int) -> str:
    return str(reading(lambda: psutil.Process(pid).name()) or f"pid {pid}")
