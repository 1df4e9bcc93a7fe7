"""Figures of processes, host and GPUs: right where they can be had, None where not, never an error."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from pagedd.client.stats_frame import Machine
from pagedd.daemon import telemetry as telemetry_module
from pagedd.daemon.rapl import Rapl
from pagedd.daemon.telemetry import HostMeter, ProcessMeter, Reading, Telemetry, TelemetryCollector

from .fake_nvml import FakeNvml

GPU = {
    "gpu_utilization_ratio": 0.5,
    "gpu_memory_used_bytes": float(1 << 30),
    "gpu_memory_total_bytes": float(4 << 30),
    "gpu_power_watts": 35.5,
    "gpu_temperature_celsius": 61.0,
    "gpu_energy_joules": 2000.0,
}


def test_the_gpus_figures_are_in_base_units_and_the_machine_shows_the_card() -> None:
    seen = Telemetry(FakeNvml()).read(None, "cuda:0")
    assert seen.figures.items() >= GPU.items()
    assert [(device.name, device.clock_mhz) for device in seen.machine.devices] == [("Card 0", 1980.0)]


def test_of_several_cards_the_engines_comes_first_and_gives_the_figures() -> None:
    nvml = FakeNvml(num_devices=3)
    seen = Telemetry(nvml).read(None, "cuda:1")
    assert [device.index for device in seen.machine.devices] == [1, 0, 2]
    assert nvml.asked == [("utilization", 1), ("utilization", 0), ("utilization", 2)]


def test_a_driver_that_does_not_count_its_cards_still_shows_the_engines() -> None:
    seen = Telemetry(FakeNvml(broken=("nvmlDeviceGetCount",), num_devices=3)).read(None, "cuda:1")
    assert [device.index for device in seen.machine.devices] == [1]


def test_without_a_driver_the_gpu_figures_are_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry_module, "load_nvml", lambda: None)
    seen = Telemetry().read(None, "cuda:0")
    assert {name: seen.figures[name] for name in GPU} == dict.fromkeys(GPU)
    assert [(device.index, device.power_w) for device in seen.machine.devices] == [(0, None)]


def test_a_cpu_engine_asks_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry_module, "load_nvml", lambda: pytest.fail("NVML was loaded"))
    seen = Telemetry().read(None, "cpu")
    assert {name: seen.figures[name] for name in GPU} == dict.fromkeys(GPU)
    assert seen.machine.devices == []


def test_processes_show_their_memory_and_the_host_its_own() -> None:
    seen = Telemetry().read(os.getpid(), "cpu")
    for name in ("front_rss_bytes", "engine_rss_bytes"):
        assert seen.figures[name] == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    total = psutil.virtual_memory().total
    assert (seen.figures["host_memory_total_bytes"], seen.machine.memory_total_bytes) == (total, total)
    assert 0 < (seen.machine.memory_used_bytes or 0) < total
    assert seen.machine.num_cores == psutil.cpu_count()


@pytest.mark.parametrize("call", ["virtual_memory", "cpu_times", "sensors_temperatures"])
def test_what_a_container_does_not_tell_costs_its_own_figures(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: object) -> None:
        raise OSError("not here")

    monkeypatch.setattr(psutil, call, fails, raising=False)
    telemetry = Telemetry()
    time.sleep(0.3)  # the kernel counts in hundredths, and a busy machine late
    machine = telemetry.read(None, "cpu").machine
    missing = {
        "virtual_memory": {"memory_used_bytes", "memory_total_bytes"},
        "cpu_times": {"cpu_percent"},
        "sensors_temperatures": {"temperature_c"},
    }
    for name in ("cpu_percent", "memory_used_bytes", "memory_total_bytes"):
        assert (getattr(machine, name) is None) == (name in missing[call])


def test_the_temperature_is_the_processors_hottest(monkeypatch: pytest.MonkeyPatch) -> None:
    sensors = {"nvme": [90.0], "coretemp": [41.0, 55.0, -273.0, 65535.0]}
    readings = {name: [SimpleNamespace(current=celsius) for celsius in values] for name, values in sensors.items()}
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: readings, raising=False)
    assert Telemetry().read(None, "cpu").machine.temperature_c == 55.0


def test_the_cpu_share_is_that_since_the_last_reading_whatever_thread_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    times = SimpleNamespace(user=10.0, system=0.0, idle=90.0, iowait=0.0, guest=0.0)

    class Times(SimpleNamespace):
        def __iter__(self) -> Iterator[float]:
            return iter(vars(self).values())

    monkeypatch.setattr(psutil, "cpu_times", lambda: Times(**vars(times)))
    meter = HostMeter()
    assert meter.cpu_percent() is None  # no time has passed
    times.user, times.idle, times.iowait, times.guest = 12.0, 95.0, 3.0, 1.0
    seen: list[float | None] = []
    reader = threading.Thread(target=lambda: seen.append(meter.cpu_percent()))
    reader.start()
    reader.join()
    assert seen == [20.0]


def test_no_engine_and_a_dead_engine_have_no_figures() -> None:
    assert Telemetry().read(None, None).figures["engine_rss_bytes"] is None
    assert ProcessMeter(2**22 + 1).read() == (None, None)


def test_readers_that_ask_at_once_share_a_reading() -> None:
    telemetry = Telemetry()
    assert telemetry.read(None, "cpu") is telemetry.read(None, "cpu")
    assert telemetry.read(os.getpid(), "cpu").figures["engine_rss_bytes"] is not None


def test_while_a_driver_does_not_answer_others_get_the_reading_before_and_after_a_while_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nvml, asked, may_answer = FakeNvml(), threading.Event(), threading.Event()
    telemetry = Telemetry(nvml)
    assert telemetry.read(None, "cuda:0").machine != Machine()

    def hangs(handle: int) -> int:
        asked.set()
        assert may_answer.wait(10)
        return 1_000

    nvml.nvmlDeviceGetPowerUsage = hangs  # type: ignore[method-assign]
    hanging = threading.Thread(target=telemetry.read, args=(os.getpid(), "cuda:0"))
    hanging.start()
    assert asked.wait(10)
    assert telemetry.read(os.getpid(), "cuda:0").figures["gpu_power_watts"] == 35.5
    monkeypatch.setattr(telemetry_module, "_STALE_S", 0.0)
    assert telemetry.read(os.getpid(), "cuda:0") == Reading()
    may_answer.set()
    hanging.join()
    assert telemetry.read(os.getpid(), "cuda:0").figures["gpu_power_watts"] == 1.0


def test_prometheus_sees_what_is_available_and_energy_as_a_counter() -> None:
    figures = {"gpu_power_watts": 35.5, "gpu_energy_joules": 9.0, "cpu_energy_joules": 4.0, "front_rss_bytes": None}
    collector = TelemetryCollector(lambda: figures)
    samples = {sample.name: sample.value for metric in collector.collect() for sample in metric.samples}
    assert samples == {
        "pagedd:gpu_power_watts": 35.5,
        "pagedd:gpu_energy_joules_total": 9.0,
        "pagedd:cpu_energy_joules_total": 4.0,
    }


def test_energy_can_be_read_alone_and_is_the_same_counter() -> None:
    telemetry = Telemetry(FakeNvml())
    assert telemetry.read_energy("cuda:0")["gpu_energy_joules"] == 2000.0
    assert telemetry.read_energy("cpu")["gpu_energy_joules"] is None
    assert telemetry.read_energy(None).keys() == {"gpu_energy_joules", "cpu_energy_joules"}


# The energy of the processor's packages


class Zones:
    """The files of Linux's powercap, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, zone: str, energy_uj: int, maximum_uj: int = 10_000_000) -> None:
        (self.folder / zone).mkdir(exist_ok=True)
        (self.folder / zone / "energy_uj").write_text(f"{energy_uj}\n")
        (self.folder / zone / "max_energy_range_uj").write_text(f"{maximum_uj}\n")


def test_packages_add_up_and_their_parts_do_not_count_again(tmp_path: Path) -> None:
    zones = Zones(tmp_path)
    for zone in ("intel-rapl:0", "intel-rapl:1", "intel-rapl:0:0"):
        zones.write(zone, 1_000_000)
    rapl = Rapl(tmp_path)
    assert rapl.read() == (0.0, None)
    for zone in ("intel-rapl:0", "intel-rapl:1", "intel-rapl:0:0"):
        zones.write(zone, 3_000_000)
    joules, watts = rapl.read()
    assert joules == 4.0
    assert watts is not None
    assert watts > 0


def test_a_counter_that_wraps_goes_on(tmp_path: Path) -> None:
    zones = Zones(tmp_path)
    zones.write("intel-rapl:0", 9_000_000)
    rapl = Rapl(tmp_path)
    rapl.read()
    zones.write("intel-rapl:0", 500_000)
    assert rapl.read()[0] == 1.5


@pytest.mark.parametrize("maximum_uj", [0, 262_000_000_000])
def test_a_counter_that_began_anew_is_not_taken_for_one_that_wrapped(tmp_path: Path, maximum_uj: int) -> None:
    zones = Zones(tmp_path)
    zones.write("intel-rapl:0", 100_000_000_000, maximum_uj)
    rapl = Rapl(tmp_path)
    rapl.read()
    zones.write("intel-rapl:0", 500_000, maximum_uj)
    joules, watts = rapl.read()
    assert (joules, watts) == (0.0, 0.0)
    zones.write("intel-rapl:0", 1_500_000, maximum_uj)
    assert rapl.read()[0] == 1.0


def test_what_could_not_be_read_for_a_while_is_in_the_next_reading(tmp_path: Path) -> None:
    zones = Zones(tmp_path)
    zones.write("intel-rapl:0", 1_000_000)
    rapl = Rapl(tmp_path)
    rapl.read()
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("")
    assert rapl.read()[0] == 0.0
    zones.write("intel-rapl:0", 4_000_000)
    assert rapl.read()[0] == 3.0


def test_without_the_files_or_the_right_to_read_them_there_is_no_figure(tmp_path: Path) -> None:
    assert Rapl(tmp_path / "absent").read() == (None, None)
    (tmp_path / "intel-rapl:0").mkdir()
    assert Rapl(tmp_path).read() == (None, None)
