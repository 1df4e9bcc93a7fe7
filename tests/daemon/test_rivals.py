"""Who else needs the device, over programs, a card and a clock that a test makes up."""

from pathlib import Path

import pytest

from pagedd.daemon.config import DaemonConfig, load_config
from pagedd.daemon.rivals import CALM_S, Rivals, running_programs

from .fake_nvml import FakeNvml
from .scripted import engine_info

GIB = 1 << 30
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
        self.rivals = Rivals(config, self.nvml, lambda: self.programs, lambda: self.now_s)


def test_a_named_program_claims_the_device_while_it_runs_and_until_it_has_been_gone_for_a_while() -> None:
    scene = Scene(yield_to=("Game", "/usr/bin/blender"))
    assert scene.rivals.claim(ON_THE_CARD) is None
    scene.programs += ["game", "blender"]
    assert scene.rivals.claim(ON_THE_CARD) == "blender, game run"
    scene.programs.remove("blender")
    assert scene.rivals.claim(None) == "game runs"
    scene.programs.remove("game")
    scene.now_s = CALM_S - 0.1
    assert scene.rivals.claim(None) == "game runs"
    scene.now_s = CALM_S
    assert scene.rivals.claim(None) is None


def test_others_memory_claims_the_card_until_the_engine_fits_in_beside_the_floor_again() -> None:
    scene = Scene(yield_below_gib=0.5)
    scene.nvml.used = 3.5 * GIB
    assert scene.rivals.claim(ON_THE_CARD) is None
    scene.nvml.used = 3.75 * GIB
    assert scene.rivals.claim(ON_THE_CARD) == "0.2 GiB of the GPU are free, 0.5 are wanted"
    scene.nvml.used = 1.75 * GIB  # the engine's 2 GiB are back
    assert scene.rivals.claim(None) == "2.2 GiB of the GPU are free, 2.5 are wanted"
    scene.nvml.used, scene.now_s = 1.5 * GIB, CALM_S
    assert scene.rivals.claim(None) is None


def test_a_floor_that_does_not_fit_beside_the_engine_keeps_nobody_away_for_ever() -> None:
    scene = Scene(yield_below_gib=3)
    scene.rivals.claim(ON_THE_CARD)
    scene.now_s = CALM_S
    assert scene.rivals.claim(None) is None


@pytest.mark.parametrize("broken", ["nvmlDeviceGetMemoryInfo", "nvmlDeviceGetHandleByIndex"])
def test_a_card_that_tells_nothing_is_claimed_by_nobody(broken: str) -> None:
    scene = Scene(yield_below_gib=4)
    scene.nvml.broken = (broken,)
    assert scene.rivals.claim(ON_THE_CARD) is None


def test_an_engine_on_the_cpu_has_no_card_to_leave() -> None:
    scene = Scene(yield_below_gib=4)
    scene.nvml.used = 4 * GIB
    assert scene.rivals.claim(engine_info()) is None


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
