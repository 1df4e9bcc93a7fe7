"""Figures of GPUs: right where NVML tells them, None where not, never an error."""

import os
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest

from pagedd.client.stats_frame import Device
from pagedd.daemon.gpus import MAX_OTHERS, GpuMeter, cuda_index, freest_device, load_nvml, num_gpus

from .fake_nvml import CALLS, UNKNOWN, FakeNvml

GIB = 1 << 30
WHOLE = Device(
    index=0,
    name="Card 0",
    utilization_percent=50.0,
    memory_used_bytes=1.0 * GIB,
    memory_total_bytes=4.0 * GIB,
    power_w=35.5,
    temperature_c=61.0,
    clock_mhz=1980.0,
)


def figures(device: Device) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(device).items() if value not in (None, "", [])}


def test_a_card_that_tells_all_gives_all_figures() -> None:
    meter = GpuMeter(FakeNvml(), 0)
    assert meter.read() == WHOLE
    assert meter.energy_joules() == 2000.0


@pytest.mark.parametrize("call", CALLS)
def test_each_call_that_fails_costs_its_own_figures_only(call: str) -> None:
    nvml = FakeNvml(broken=(call,))
    nvml.compute = [(2**22 + 1, GIB)]
    whole, meter = GpuMeter(FakeNvml(), 0).read(), GpuMeter(nvml, 0)
    whole.others = [(f"pid {2**22 + 1}", 1.0 * GIB)]
    shown, energy = figures(meter.read()), meter.energy_joules()
    missing = figures(whole).keys() - shown.keys()
    assert shown.items() <= figures(whole).items()
    expected = {
        "nvmlDeviceGetHandleByIndex": figures(whole).keys() - {"index"},
        "nvmlDeviceGetName": {"name"},
        "nvmlDeviceGetMemoryInfo": {"memory_used_bytes", "memory_total_bytes"},
        "nvmlDeviceGetUtilizationRates": {"utilization_percent"},
        "nvmlDeviceGetPowerUsage": {"power_w"},
        "nvmlDeviceGetTemperature": {"temperature_c"},
        "nvmlDeviceGetClockInfo": {"clock_mhz"},
        "nvmlDeviceGetComputeRunningProcesses": {"others"},
    }
    assert missing == expected.get(call, set())
    assert (energy is None) == (call in ("nvmlDeviceGetHandleByIndex", "nvmlDeviceGetTotalEnergyConsumption"))


def test_a_card_that_tells_nothing_and_no_nvml_at_all_give_no_figure() -> None:
    for meter in (GpuMeter(FakeNvml(broken=tuple(CALLS)), 1), GpuMeter(None, 1)):
        assert meter.read() == Device(index=1)
        assert meter.energy_joules() is None


@pytest.mark.parametrize("used", [None, UNKNOWN, 2**32 - 1, 4 * GIB + 1, -1, "much", float("nan"), True])
def test_a_memory_figure_that_cannot_be_is_not_available(used: Any) -> None:
    device = GpuMeter(FakeNvml(used=used), 0).read()
    assert device.memory_used_bytes is None
    assert device.memory_total_bytes == 4 * GIB


def test_a_card_of_unknown_size_shows_what_is_used() -> None:
    nvml = FakeNvml()
    nvml.total = UNKNOWN
    device = GpuMeter(nvml, 0).read()
    assert (device.memory_used_bytes, device.memory_total_bytes) == (1.0 * GIB, None)


def test_a_driver_that_comes_late_is_found() -> None:
    nvml = FakeNvml(broken=("nvmlDeviceGetHandleByIndex",))
    meter = GpuMeter(nvml, 0)
    assert meter.read() == Device(index=0)
    nvml.broken = ()
    assert meter.read() == WHOLE


def test_others_are_programs_by_name_with_the_most_first_and_without_the_engine() -> None:
    nvml, ghost = FakeNvml(), 2**22 + 1
    me, parent = os.getpid(), os.getppid()
    nvml.compute = [(me, GIB), (parent, 5)]
    nvml.graphics = [(parent, 7), (ghost, None)]
    others = GpuMeter(nvml, 0).read(engine_pid=me).others
    assert others == [(psutil.Process(parent).name(), 7.0), (f"pid {ghost}", None)]


def test_where_the_engine_is_not_listed_pids_mean_nothing_and_nobody_is_named() -> None:
    nvml = FakeNvml()
    nvml.compute = [(2**22 + 1, GIB)]
    assert GpuMeter(nvml, 0).read(engine_pid=os.getpid()).others == []


@pytest.mark.parametrize("used", [None, UNKNOWN, 5 * GIB])
def test_a_process_whose_memory_is_unknown_is_named_all_the_same(used: Any) -> None:
    nvml = FakeNvml()
    nvml.compute = [(2**22 + 1, used)]
    assert GpuMeter(nvml, 0).read().others == [(f"pid {2**22 + 1}", None)]


def test_others_are_few_however_many_there_are() -> None:
    nvml = FakeNvml()
    nvml.compute = [(2**22 + i, i) for i in range(1, 100)]
    others = GpuMeter(nvml, 0).read().others
    assert [used for _, used in others] == [99.0 - i for i in range(MAX_OTHERS)]


@pytest.mark.parametrize("nvml", [None, FakeNvml(broken=("nvmlDeviceGetCount",))])
def test_how_many_cards_there_are_may_be_unknown(nvml: FakeNvml | None) -> None:
    assert num_gpus(nvml) == 0


def test_where_the_choice_is_left_the_card_with_most_free_memory_is_taken() -> None:
    nvml = FakeNvml(num_devices=3)
    used = {0: 3 << 30, 1: 1 << 29, 2: 2**64 - 1}  # the last one does not tell
    nvml.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(used=used[handle], total=4 << 30)
    assert freest_device("auto", nvml, {}) == freest_device("cuda", nvml, {}) == "cuda:1"
    for device, environ in (("cuda:0", {}), ("cpu", {}), ("auto", {"CUDA_VISIBLE_DEVICES": "2"})):
        assert freest_device(device, nvml, environ) is None
    assert freest_device("auto", FakeNvml(num_devices=1), {}) is None
    assert freest_device("auto", FakeNvml(broken=("nvmlDeviceGetMemoryInfo",), num_devices=2), {}) is None
    assert freest_device("auto", None, {}) is None


def test_a_machine_without_a_driver_has_no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)  # as when it is not installed
    assert load_nvml() is None


@pytest.mark.parametrize(
    ("device", "index"), [("cuda", 0), ("cuda:1", 1), ("cpu", None), (None, None), ("cuda:x", None)]
)
def test_a_cuda_device_is_known_by_its_index(device: str | None, index: int | None) -> None:
    assert cuda_index(device) == index
