"""How fast the box may compute, over a made-up /sys and a clock that a test moves."""

from pathlib import Path

from pagedd.daemon.config import DaemonConfig
from pagedd.daemon.pace import Pace
from pagedd.daemon.power import Power, Speed


class Sysfs:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, where: str, **files: object) -> None:
        place = self.folder / where
        place.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (place / name).write_text(f"{content}\n")


def test_a_laptop_without_its_cable_computes_less(tmp_path: Path) -> None:
    sysfs = Sysfs(tmp_path)
    power = Power(DaemonConfig(max_tokens_per_second=50, max_tokens_per_second_on_battery=20), tmp_path)
    sysfs.write("power_supply/AC", type="Mains", online=1)
    sysfs.write("power_supply/BAT0", type="Battery", status="Discharging")
    assert power.speed() == Speed(50, "as configured")
    sysfs.write("power_supply/AC", online=0)
    assert power.speed() == Speed(20, "on battery")
    sysfs.write("power_supply/BAT0", status="Charging")
    assert power.speed() == Speed(50, "as configured")


def test_the_battery_of_a_mouse_is_not_the_machines(tmp_path: Path) -> None:
    Sysfs(tmp_path).write("power_supply/hid", type="Battery", status="Discharging", scope="Device")
    assert not Power(DaemonConfig(), tmp_path).is_on_battery()


def test_a_hot_machine_computes_less_until_it_has_cooled_down(tmp_path: Path) -> None:
    sysfs = Sysfs(tmp_path)
    power = Power(DaemonConfig(max_tokens_per_second_when_hot=5, hot_celsius=80), tmp_path)
    speeds = []
    for celsius in (79, 80, 76, 75, 74, 79):
        sysfs.write("thermal/thermal_zone0", temp=30_000)
        sysfs.write("thermal/thermal_zone1", temp=1000 * celsius)
        speeds.append(power.speed().tokens_per_second)
    assert speeds == [None, 5, 5, 5, None, None]


def test_a_machine_that_tells_nothing_or_nonsense_is_on_mains_and_cool(tmp_path: Path) -> None:
    config = DaemonConfig(max_tokens_per_second_on_battery=20, max_tokens_per_second_when_hot=5)
    assert Power(config, tmp_path / "none").speed() == Speed(None)
    Sysfs(tmp_path).write("thermal/thermal_zone0", temp="unknown")
    (tmp_path / "power_supply" / "BAT0").mkdir(parents=True)
    assert Power(config, tmp_path).speed() == Speed(None)


def test_only_settings_make_anybody_look(tmp_path: Path) -> None:
    assert not Power(DaemonConfig(), tmp_path).is_limited
    for name in ("max_tokens_per_second", "max_tokens_per_second_on_battery", "max_tokens_per_second_when_hot"):
        assert Power(DaemonConfig(**{name: 1.0}), tmp_path).is_limited  # type: ignore[arg-type]


def test_the_next_step_waits_for_what_the_last_ones_tokens_are_worth() -> None:
    now_s = 100.0
    pace = Pace(lambda: now_s)
    pace.begin_step()
    pace.end_step(1000)
    assert pace.wait_s == 0, "as fast as it goes"
    pace.tokens_per_second = 10.0
    pace.begin_step()
    now_s += 0.5
    pace.end_step(20)
    assert pace.wait_s == 1.5
    now_s += 60
    assert pace.wait_s == 0
    pace.begin_step()
    pace.end_step(5)
    assert pace.wait_s == 0.5, "the minute before is not saved up"
    pace.tokens_per_second = None
    assert pace.wait_s == 0
