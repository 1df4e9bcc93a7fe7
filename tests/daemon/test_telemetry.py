"""Figures of processes and devices: right where they can be had, None where not, never an error."""

import os
import types
from typing import Any

import psutil
import pytest

from pagedd.daemon import telemetry
from pagedd.daemon.telemetry import GpuMeter, ProcessMeter, Telemetry, TelemetryCollector

CALLS = [name for name in vars(telemetry.Nvml) if name.startswith("nvmlDeviceGet")]


class FakeNvml:
    """A 4 GiB card that is half busy. `broken` calls raise, as NVML does for what a card does not have."""

    def __init__(self, broken: tuple[str, ...] = (), used: int | None = 1 << 30) -> None:
        self._broken = broken
        self._used = used

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name in object.__getattribute__(self, "_broken"):
            raise RuntimeError("Not Supported")
        return object.__getattribute__(self, name)

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return types.SimpleNamespace(used=self._used, total=4 << 30)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return types.SimpleNamespace(gpu=50)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return 35_500

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return 61

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        return 2_000_000


WHOLE = {
    "gpu_utilization_ratio": 0.5,
    "gpu_memory_used_bytes": float(1 << 30),
    "gpu_memory_total_bytes": float(4 << 30),
    "gpu_power_watts": 35.5,
    "gpu_temperature_celsius": 61.0,
    "gpu_energy_joules": 2000.0,
}


def test_a_card_that_tells_all_gives_all_figures_in_base_units() -> None:
    assert GpuMeter(FakeNvml(), 0).read() == WHOLE


@pytest.mark.parametrize("call", CALLS)
def test_each_call_that_fails_costs_its_own_figures_only(call: str) -> None:
    figures = GpuMeter(FakeNvml(broken=(call,)), 0).read()
    missing = {name for name, value in figures.items() if value is None}
    assert missing
    assert {name: value for name, value in figures.items() if value is not None}.items() <= WHOLE.items()
    if call != "nvmlDeviceGetHandleByIndex":
        assert len(missing) <= 2


def test_a_card_that_tells_nothing_gives_no_figure() -> None:
    assert set(GpuMeter(FakeNvml(broken=tuple(CALLS)), 0).read().values()) == {None}


@pytest.mark.parametrize("used", [None, 2**64 - 1, 2**32 - 1, (4 << 30) + 1, -1])
def test_a_memory_figure_that_cannot_be_is_not_available(used: int | None) -> None:
    figures = GpuMeter(FakeNvml(used=used), 0).read()
    assert figures["gpu_memory_used_bytes"] is None
    assert figures["gpu_memory_total_bytes"] == 4 << 30


def test_without_a_driver_the_gpu_figures_are_not_available() -> None:
    figures = Telemetry().figures(None, "cuda:0")
    assert [figures[name] for name in GpuMeter.NAMES] == [None] * len(GpuMeter.NAMES)


def test_a_cpu_engine_asks_no_gpu() -> None:
    figures = Telemetry(FakeNvml()).figures(None, "cpu")
    assert figures["gpu_power_watts"] is None


def test_the_second_card_is_asked_for_cuda_1() -> None:
    asked: list[int] = []
    nvml = FakeNvml()
    nvml.nvmlDeviceGetPowerUsage = lambda handle: asked.append(handle) or 0  # type: ignore[method-assign,func-returns-value]
    Telemetry(nvml).figures(None, "cuda:1")
    assert asked == [1]


def test_processes_show_their_memory_and_the_host_its_own() -> None:
    figures = Telemetry().figures(os.getpid(), "cpu")
    assert figures["front_rss_bytes"] == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    assert figures["engine_rss_bytes"] == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    assert figures["host_memory_total_bytes"] == psutil.virtual_memory().total


def test_no_engine_and_a_dead_engine_have_no_figures() -> None:
    assert Telemetry().figures(None, None)["engine_rss_bytes"] is None
    assert ProcessMeter(2**22 + 1).read() == (None, None)


def test_readers_that_ask_at_once_share_a_reading() -> None:
    telemetry = Telemetry()
    assert telemetry.figures(None, "cpu") is telemetry.figures(None, "cpu")
    assert telemetry.figures(os.getpid(), "cpu")["engine_rss_bytes"] is not None


def test_prometheus_sees_what_is_available_and_energy_as_a_counter() -> None:
    collector = TelemetryCollector(lambda: {"gpu_power_watts": 35.5, "gpu_energy_joules": 9.0, "front_rss_bytes": None})
    samples = {sample.name: sample.value for metric in collector.collect() for sample in metric.samples}
    assert samples == {"pagedd:gpu_power_watts": 35.5, "pagedd:energy_joules_total": 9.0}
