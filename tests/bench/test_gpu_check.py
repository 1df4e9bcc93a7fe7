"""The script for a machine with a card, as far as one without can run it: tiny, interpreted, not installed."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pagedd.bench.gpu_check import main, missed_targets

ROOT = Path(__file__).parents[2]


# What a bare machine lacks, though the project needs it elsewhere.
ABSENT = {"gguf", "zmq", "msgspec", "aiohttp", "psutil", "textual", "uvloop", "prometheus_client", "pynvml"}
ON_A_BARE_MACHINE = f"""
import runpy, sys

class Bare:
    def __init__(self, finders):
        self._finders = finders

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in {ABSENT}:
            return next(filter(None, (finder.find_spec(name, path, target) for finder in self._finders)), None)

    def find_distributions(self, context):
        finders = [finder for finder in self._finders if hasattr(finder, "find_distributions")]
        return [found for finder in finders for found in finder.find_distributions(context)]

sys.meta_path[:] = [Bare(sys.meta_path[:])]
script = sys.argv.pop(1)
sys.argv[0] = script
runpy.run_path(script, run_name="__main__")
"""


Here = Callable[..., int]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Here:
    """The script in this process, where torch is imported already; gives its exit status."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("PAGEDD_KERNELS", "auto")  # which it sets, and which is put back

    def run_here(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["gpu_check.py", *arguments])
        return main()

    return run_here


def run_on_a_bare_machine(*arguments: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    environ = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environ.pop("TRITON_INTERPRET", None)  # the script's own business
    return subprocess.run(
        [sys.executable, "-P", "-c", ON_A_BARE_MACHINE, str(ROOT / "bench" / "gpu_check.py"), *arguments],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.mark.slow
def test_every_part_runs_from_a_checkout_and_the_last_line_is_json(tmp_path) -> None:
    done = run_on_a_bare_machine("--tiny", "--seed", "3", "--output", "figures.json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report == json.loads((tmp_path / "figures.json").read_text())
    assert not report["failed"]
    by_part: dict[str, list[dict]] = {}
    for row in report["rows"]:
        by_part.setdefault(row["part"], []).append(row)
    assert list(by_part) == ["correct", "ceilings", "attention", "linear", "graphs", "model", "compiled"]
    assert all(row["value"] < 0.02 for row in by_part["correct"])
    whats = {row["what"] for row in report["rows"]}
    assert set(report["targets"]) <= whats, "each target has its row"


def test_parts_are_chosen_by_name_and_a_wrong_one_is_refused(here: Here, capsys: pytest.CaptureFixture[str]) -> None:
    assert here("--tiny", "ceilings") == 0
    assert {row["part"] for row in json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]} == {"ceilings"}
    with pytest.raises(SystemExit, match="2"):
        here("--tiny", "speed")
    assert "no such part: speed; there are correct, ceilings" in capsys.readouterr().err


def test_a_missed_target_is_named_with_both_numbers() -> None:
    rows = [
        {"what": "decode.bf16", "value": 4000.0, "share": 0.7},
        {"what": "prefill.bf16", "value": 900.0, "share": 0.6},
        {"what": "times transformers (eager), batch 1", "value": 1.5, "share": None},
    ]
    assert missed_targets(rows) == [
        "decode.bf16 is 0.7, 0.8 wanted",
        "times transformers (eager), batch 1 is 1.5, 2.0 wanted",
    ]


def test_what_is_not_installed_is_named_with_the_way_to_get_it(
    monkeypatch: pytest.MonkeyPatch, here: Here, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else find_spec(name))
    assert here("--tiny") == 2
    assert "not installed: transformers; with this Python: pip install torch triton" in capsys.readouterr().err


def test_a_machine_without_a_card_is_told_so(here: Here, capsys: pytest.CaptureFixture[str]) -> None:
    assert here() == 2
    assert "no card that torch can use" in capsys.readouterr().err
