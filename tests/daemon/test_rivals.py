"""Who else needs the device, over programs, a card and a clock that a test makes up."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from pagedd.daemon import rivals
from pagedd.daemon.config import DaemonConfig, load_config
from pagedd.daemon.engine_state import EngineState
from pagedd.daemon.rivals import CALM_S, Rivals, running_programs

from .fake_nvml import UNKNOWN, FakeNvml
from .scripted_host import engine_info

GIB = 1 << 30
PID = 77  # of the engine
# 1 GiB of weights and 1 GiB of KV.
ON_THE_CARD = engine_info(
    device="cuda:0", model_bytes=GIB, num_blocks=1024, block_size=16, kv_bytes_per_token=GIB >> 14
)


class Scene:
    def __init__(self, **settings: object) -> None:
        self.programs = ["init", "bash"]
        self.now_s = 0.0
        self.nvml = FakeNvml(used=0)
        config = DaemonConfig(**settings)  # type: ignore[arg-type]
        self.rivals = Rivals(config, lambda: self.nvml, lambda: self.programs, lambda: self.now_s)


def test_a_named_program_claims_the_device_while_it_runs_and_until_it_has_been_gone_for_a_while() -> None:
    scene = Scene(yield_to=("Game", "/usr/bin/blender"))
    assert scene.rivals.claim(ON_THE_CARD, PID, EngineState.READY) is None
    scene.programs += ["game", "blender"]
    assert scene.rivals.claim(ON_THE_CARD, PID, EngineState.READY) == "blender, game run"
    scene.programs.remove("blender")
    assert scene.rivals.claim(None, None, EngineState.ASLEEP) == "game runs"
    scene.programs.remove("game")
    scene.now_s = CALM_S - 0.1
    assert scene.rivals.claim(None, None, EngineState.ASLEEP) == "game runs"
    scene.now_s = CALM_S
    assert scene.rivals.claim(None, None, EngineState.ASLEEP) is None


def test_others_memory_claims_the_card_until_the_engine_fits_in_beside_the_floor_again() -> None:
    scene = Scene(yield_below_gib=0.5)
    scene.nvml.used = 3.5 * GIB
    assert scene.rivals.claim(ON_THE_CARD, PID, EngineState.READY) is None
    scene.nvml.used = 3.75 * GIB
    assert scene.rivals.claim(ON_THE_CARD, PID, EngineState.READY) == "0.2 GiB of the GPU are free, 0.5 are wanted"
    scene.nvml.used = 1.75 * GIB  # the engine's 2 GiB are back
    assert scene.rivals.claim(None, None, EngineState.ASLEEP) == "2.2 GiB of the GPU are free, 2.5 are wanted"
    scene.nvml.used, scene.now_s = 1.5 * GIB, CALM_S
    assert scene.rivals.claim(None, None, EngineState.ASLEEP) is None


@pytest.mark.parametrize("state", [EngineState.STARTING, EngineState.LOADING, EngineState.RESTARTING])
def test_the_half_loaded_weights_of_ones_own_engine_are_no_rival(state: EngineState) -> None:
    scene = Scene(yield_below_gib=0.5)
    scene.rivals.claim(ON_THE_CARD, PID, EngineState.READY)
    scene.nvml.used = 1.75 * GIB
    assert scene.rivals.claim(None, None, state) is None
    assert scene.rivals.claim(None, None, EngineState.ASLEEP) == "2.2 GiB of the GPU are free, 2.5 are wanted"


def test_what_the_driver_says_the_engine_holds_has_to_fit_in_beside_the_floor_again() -> None:
    """Half a GiB more than its weights and KV: a context and graphs."""
    scene = Scene(yield_below_gib=0.5)
    scene.nvml.used = 3.75 * GIB
    scene.nvml.compute = [(PID, int(2.5 * GIB)), (78, GIB)]
    assert scene.rivals.claim(ON_THE_CARD, PID, EngineState.READY) == "0.2 GiB of the GPU are free, 0.5 are wanted"
    scene.nvml.compute, scene.nvml.used = [(PID, GIB // 4), (78, GIB)], 1.25 * GIB
    scene.rivals.claim(ON_THE_CARD, PID, EngineState.READY)  # it is on its way out, and has given most back
    scene.nvml.compute = [(78, GIB)]
    assert scene.rivals.claim(None, None, EngineState.ASLEEP) == "2.8 GiB of the GPU are free, 3.0 are wanted"
    scene.nvml.used, scene.now_s = GIB, CALM_S
    assert scene.rivals.claim(None, None, EngineState.ASLEEP) is None


@pytest.mark.parametrize("held", [None, UNKNOWN])
def test_where_the_driver_does_not_say_what_the_engine_holds_its_weights_and_blocks_count(held: int | None) -> None:
    scene = Scene(yield_below_gib=0.5)
    scene.nvml.used, scene.nvml.compute = 3.5 * GIB, [(PID, held)]
    assert scene.rivals.claim(ON_THE_CARD, PID, EngineState.READY) is None
    scene.nvml.used = 1.75 * GIB
    assert scene.rivals.claim(None, None, EngineState.ASLEEP) == "2.2 GiB of the GPU are free, 2.5 are wanted"


def test_the_next_engine_is_measured_anew() -> None:
    scene = Scene(yield_below_gib=0.5)
    scene.nvml.used, scene.nvml.compute = 3.25 * GIB, [(PID, 3 * GIB)]
    assert scene.rivals.claim(ON_THE_CARD, PID, EngineState.READY) is None
    scene.nvml.used, scene.nvml.compute = 2.5 * GIB, [(PID + 1, int(2.25 * GIB))]
    assert scene.rivals.claim(ON_THE_CARD, PID + 1, EngineState.READY) is None
    scene.nvml.used = 1.25 * GIB
    assert scene.rivals.claim(None, None, EngineState.ASLEEP) is None


def test_a_named_program_claims_the_device_from_an_engine_that_loads() -> None:
    scene = Scene(yield_to=("game",))
    scene.programs.append("game")
    assert scene.rivals.claim(None, None, EngineState.LOADING) == "game runs"


def test_the_card_that_is_looked_at_is_the_engines_own_after_it_moved_to_another() -> None:
    scene = Scene(yield_below_gib=0.5)
    scene.nvml.num_devices = 2
    used = {0: 0.0, 1: 4.0 * GIB}
    scene.nvml.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(  # type: ignore[method-assign]
        used=used[handle], total=4 * GIB
    )
    assert scene.rivals.claim(ON_THE_CARD, PID, EngineState.READY) is None
    moved = replace(ON_THE_CARD, device="cuda:1")
    assert scene.rivals.claim(moved, PID, EngineState.READY) == "0.0 GiB of the GPU are free, 0.5 are wanted"


def test_a_floor_that_does_not_fit_beside_the_engine_keeps_nobody_away_for_ever() -> None:
    scene = Scene(yield_below_gib=3)
    scene.rivals.claim(ON_THE_CARD, PID, EngineState.READY)
    scene.now_s = CALM_S
    assert scene.rivals.claim(None, None, EngineState.ASLEEP) is None


@pytest.mark.parametrize("broken", ["nvmlDeviceGetMemoryInfo", "nvmlDeviceGetHandleByIndex"])
def test_a_card_that_tells_nothing_is_claimed_by_nobody(broken: str) -> None:
    scene = Scene(yield_below_gib=4)
    scene.nvml.broken = (broken,)
    assert scene.rivals.claim(ON_THE_CARD, PID, EngineState.READY) is None


def test_whoever_looks_for_programs_alone_loads_no_driver() -> None:
    config = DaemonConfig(yield_to=("game",))
    rivals = Rivals(config, lambda: pytest.fail("NVML was loaded"), lambda: ["game"], lambda: 0.0)
    assert rivals.claim(ON_THE_CARD, PID, EngineState.READY) == "game runs"


def test_an_engine_on_the_cpu_has_no_card_to_leave() -> None:
    scene = Scene(yield_below_gib=4)
    scene.nvml.used = 4 * GIB
    assert scene.rivals.claim(engine_info(), PID, EngineState.READY) is None


def test_without_settings_nobody_is_looked_for() -> None:
    assert not Scene().rivals.are_awaited
    assert Scene(yield_to=("game",)).rivals.are_awaited
    assert Scene(yield_below_gib=1.0).rivals.are_awaited


def test_programs_are_listed_in_the_settings_as_a_list_or_with_commas(tmp_path: Path) -> None:
    file = tmp_path / "pagedd.toml"
    file.write_text('yield_to = ["game", "blender"]\n')
    assert load_config([], {}, file).config.yield_to == ("game", "blender")
    assert load_config(["--yield-to", "game, blender"], {}, tmp_path / "none").config.yield_to == ("game", "blender")
    assert load_config([], {"PAGEDD_YIELD_TO": "nobody"}, file).config.yield_to == ()


def test_the_machines_own_programs_are_seen() -> None:
    assert any("python" in name or "pytest" in name for name in running_programs())


def test_programs_of_strangers_do_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ours = os.getegid()
    users = {7: ("of-the-group", 99), 8: ("by-its-own-group", ours), 9: ("stranger", 99), 10: ("logged-in", 99)}
    monkeypatch.setattr("pwd.getpwuid", lambda uid: SimpleNamespace(pw_name=users[uid][0], pw_gid=users[uid][1]))
    monkeypatch.setattr("grp.getgrgid", lambda gid: SimpleNamespace(gr_gid=gid, gr_mem=["of-the-group"]))
    monkeypatch.setattr(rivals, "_SESSIONS", tmp_path)
    (tmp_path / "10").touch()
    found = {f"of-{uid}": uid for uid in (0, os.geteuid(), *users, 11)} | {"unknown": None}
    processes = [
        SimpleNamespace(info={"name": name, "uids": None if uid is None else SimpleNamespace(real=uid)})
        for name, uid in found.items()
    ]
    monkeypatch.setattr("psutil.process_iter", lambda attributes: processes)
    assert set(running_programs()) == {"of-0", f"of-{os.geteuid()}", "of-7", "of-8", "of-10"}


def test_programs_that_the_kernel_hides_are_said_to_be(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Scene(yield_to=("game",))
    assert caplog.messages == []
    monkeypatch.setattr(rivals, "_INIT", tmp_path / "1" / "comm")
    Scene(yield_below_gib=1)
    assert caplog.messages == []
    Scene(yield_to=("game",))
    assert "ProtectProc=default shows them" in caplog.text
