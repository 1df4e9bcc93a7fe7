"""NVML without a card: every device is a 4 GiB card that is half busy, unless a test breaks it."""

import types
from typing import Any

from pagedd.daemon.gpus import Nvml

CALLS = [name for name in vars(Nvml) if name.startswith("nvmlDeviceGet")]
UNKNOWN = 2**64 - 1  # what NVML gives for a size that it does not know


class FakeNvml:
    """`broken` calls raise, as NVML does for what a card does not have.

    Attributes:
        num_devices, used, total, compute, graphics: what the calls say; the last two are (pid, bytes).
    """

    def __init__(self, broken: tuple[str, ...] = (), num_devices: int = 1, used: Any = 1 << 30) -> None:
        self.broken = broken
        self.num_devices = num_devices
        self.used = used
        self.total: Any = 4 << 30
        self.compute: list[tuple[int, Any]] = []
        self.graphics: list[tuple[int, Any]] = []
        self.asked: list[tuple[str, int]] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name in object.__getattribute__(self, "broken"):
            raise RuntimeError("Not Supported")
        return object.__getattribute__(self, name)

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return self.num_devices

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> str | bytes:
        return f"Card {handle}".encode()

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return types.SimpleNamespace(used=self.used, total=self.total)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        self.asked.append(("utilization", handle))
        return types.SimpleNamespace(gpu=50)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return 35_500

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return 61

    def nvmlDeviceGetClockInfo(self, handle: int, clock: int) -> int:
        return 1980

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        return 2_000_000

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        return [types.SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.compute]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: int) -> list[Any]:
        return [types.SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.graphics]
