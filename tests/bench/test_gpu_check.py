"""The script for a machine with a card, as far as one without can run it: tiny, interpreted, not installed."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar, TextIO

import pytest
import torch
import triton

from pagedd.bench import gpu_check, gpu_correct, gpu_inputs, gpu_parts
from pagedd.bench.gpu_check import main, missed_targets
from pagedd.bench.gpu_rows import row
from pagedd.engine.errors import DeviceLostError
from pagedd.kernels import reference, torch_ops
from pagedd.kernels.kv_form import FORMS
from pagedd.kernels.triton import linear, paged_attention, split_decode
from pagedd.kernels.triton.attention_shape import native_dtype
from pagedd.kernels.triton.card import Card

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
    for found in report["rows"]:
        by_part.setdefault(found["part"], []).append(found)
    assert list(by_part) == ["ceilings", "attention", "model", "compiled", "linear", "graphs", "correct"]
    assert all(row["value"] < 0.02 for row in by_part["correct"])
    whats = {row["what"] for row in report["rows"]}
    assert set(report["targets"]) <= whats, "each target has its row"


def test_parts_are_chosen_by_name_and_a_wrong_one_is_refused(here: Here, capsys: pytest.CaptureFixture[str]) -> None:
    assert here("--tiny", "ceilings") == 0
    assert {row["part"] for row in json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]} == {"ceilings"}
    with pytest.raises(SystemExit, match="2"):
        here("--tiny", "speed")
    assert "no such part: speed; there are ceilings, attention" in capsys.readouterr().err


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
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else find_spec(name))
    assert here("--tiny") == 2
    assert "not installed: triton; with this Python: pip install torch triton" in capsys.readouterr().err


def test_without_transformers_the_parts_that_need_it_say_so_and_the_others_run(
    here: Here, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(gpu_parts.PARTS, "linear", lambda check: iter([row("int4", 1.0, "GB/s")]))
    assert here("--tiny", "model", "compiled", "linear", "graphs") == 1
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(report["failed"]) == {"model", "compiled", "graphs"}
    assert all("transformers" in why for why in report["failed"].values())
    assert "int4" in [found["what"] for found in report["rows"]]
    assert report["complete"] is True


def test_a_fault_in_a_part_is_a_row_and_the_parts_behind_it_run(
    here: Here, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(check: gpu_parts.Check) -> gpu_parts.Rows:
        yield row("before", 1.0, "GB/s")
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    for name in gpu_parts.PARTS:
        monkeypatch.setitem(gpu_parts.PARTS, name, fails)
    assert here("--tiny") == 1
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["failed"] == {name: f"{name}: OutOfMemoryError: CUDA out of memory" for name in gpu_parts.PARTS}
    assert [found["part"] for found in report["rows"] if found["what"] == "before"] == list(gpu_parts.PARTS)
    assert report["complete"] is True


class TheRest:
    """A process for the parts that are left: finds one figure, and comes to its end or not."""

    returncode = 0
    comes_to_its_end = True
    commands: ClassVar[list[list[str]]] = []

    def __init__(self, command: list[str], **options: object) -> None:
        self.commands.append(command)
        found = {"part": "graphs", **row("replayed, bf16, 1", 1.0, "ms")}
        Path(command[-1]).write_text(json.dumps({"complete": self.comes_to_its_end, "rows": [found]}))

    def wait(self) -> None: ...
    def kill(self) -> None: ...


@pytest.mark.parametrize("comes_to_its_end", [True, False])
def test_when_a_kernel_took_the_card_from_its_process_the_parts_that_are_left_run_in_another(
    comes_to_its_end: bool, here: Here, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def is_lost() -> None:
        raise DeviceLostError("cuda:0 answers with: an illegal memory access was encountered")

    def reads_where_nothing_is(check: gpu_parts.Check) -> gpu_parts.Rows:
        monkeypatch.setattr(gpu_parts, "check_current_device", is_lost)
        raise RuntimeError("an illegal memory access was encountered")
        yield

    monkeypatch.setattr(TheRest, "commands", [])
    monkeypatch.setattr(TheRest, "comes_to_its_end", comes_to_its_end)
    monkeypatch.setattr(gpu_check, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": TheRest}))
    monkeypatch.setitem(gpu_parts.PARTS, "linear", reads_where_nothing_is)
    assert here("--tiny", "--seed", "5", "linear", "graphs", "correct") == 1
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    (command,) = TheRest.commands
    assert command[3:10] == ["graphs", "correct", "--seed", "5", "--tiny", "--jobs", "1"]
    assert [found["what"] for found in report["rows"]][1:] == ["replayed, bf16, 1"]
    assert report["failed"] == {"linear": "linear: RuntimeError: an illegal memory access was encountered"}
    assert report["complete"] is comes_to_its_end


def test_a_machine_without_a_card_is_told_so(here: Here, capsys: pytest.CaptureFixture[str]) -> None:
    assert here() == 2
    assert "no card that torch can use" in capsys.readouterr().err


def test_a_fault_costs_one_figure_and_the_rest_is_measured(
    here: Here, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def attend(inputs: gpu_inputs.PagedInputs) -> torch.Tensor:
        if FORMS["int4"] is getattr(inputs.kv_layer, "form", None):
            raise RuntimeError("out of resource: shared memory")
        return inputs.query

    monkeypatch.setattr(gpu_parts, "_attend", attend)
    assert here("--tiny", "attention") == 1
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    failed = [row["what"] for row in report["rows"] if row["unit"] == "failed"]
    assert failed == [f"{kind}.int4: RuntimeError: out of resource: shared memory" for kind in ("decode", "prefill")]
    assert len(report["rows"]) == 2 * (len(FORMS) - 1)
    assert report["failed"] == {"attention": failed[0]}


def test_a_wrong_kernel_is_a_row_and_the_others_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_correct, "kernels", SimpleNamespace(**vars(reference) | {"keep_best": torch_ops.keep_best}))
    monkeypatch.setattr(gpu_correct.kernels, "packed_linear", lambda x, weight, bias: x.new_zeros(len(x), 96))
    rows = list(gpu_correct.compare_all(torch.device("cpu"), torch.float32, 1, is_thorough=False))
    failed = [row["what"] for row in rows if row["unit"] == "failed"]
    assert len(failed) == len(gpu_correct.WEIGHT_FORMS)
    assert all(what.startswith("packed_linear, ") and "differs by" in what for what in failed)
    assert any(row["what"] == "keep_best, weights left over" for row in rows)


def test_a_run_that_is_cut_leaves_what_it_found(here: Here, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    seen = []

    def cut(check: gpu_parts.Check) -> gpu_parts.Rows:
        yield row("first", 1.0, "GB/s")
        seen.append(json.loads(output.read_text()))
        os.kill(os.getpid(), signal.SIGTERM)
        yield row("second", 2.0, "GB/s")

    monkeypatch.setitem(gpu_parts.PARTS, "linear", cut)
    with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
        here("--tiny", "linear", "--output", str(output))
    for report in (*seen, json.loads(output.read_text())):
        assert [row["what"] for row in report["rows"]] == ["first"]
        assert report["complete"] is False


def test_an_unfit_triton_and_a_missing_compiler_are_named_before_anything_runs(
    here: Here, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(triton, "__version__", "3.5.1")
    assert here() == 2
    assert "Triton 3.5.1; 3.6 is the oldest" in capsys.readouterr().err
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    monkeypatch.setenv("CC", "no-such-compiler")
    assert here() == 2
    assert "CC=no-such-compiler" in capsys.readouterr().err
    monkeypatch.setattr("numpy.__version__", "2.4.1")
    assert here("--tiny") == 2
    assert "install 'numpy<2.4'" in capsys.readouterr().err


class Recorder:
    """In a kernel's place: notes the kinds of its launches."""

    def __init__(self, kinds: set[str], kind_of: Callable[..., str]) -> None:
        self._kinds, self._kind_of = kinds, kind_of

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *arguments, **constants: self._kinds.add(self._kind_of(*arguments, **constants))


def kind_of_attention(*arguments: object, SHORT_ROWS: int, CHUNK_ROWS: int, **constants: object) -> str:
    return "mixed" if SHORT_ROWS and CHUNK_ROWS else "short" if SHORT_ROWS else "chunk"


@pytest.mark.parametrize(
    "card",
    [
        Card(75, 40),
        Card(80, 108),
        Card(86, 28),
        Card(89, 36),
        Card(89, 128),
        Card(90, 132),
        Card(100, 148),
        Card(120, 170),
    ],
    ids=str,
)
def test_on_every_card_each_kind_of_launch_is_compared(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: set[str] = set()

    def kind_of_product(*arguments: object, GROUPS: int, **constants: object) -> str:
        num_groups, steps_per_split = arguments[8], arguments[10]
        assert isinstance(num_groups, int)
        assert isinstance(steps_per_split, int)
        is_split = num_groups > steps_per_split * GROUPS
        launched.add("product, split" if is_split else "product, whole")
        return f"vector of {min(3, steps_per_split)} steps"

    for module, name, kind in (
        (paged_attention, "_attend", kind_of_attention),
        (split_decode, "_attend_splits", lambda *arguments, **constants: "split"),
        (split_decode, "_merge_splits", lambda *arguments, **constants: "merge"),
        (linear, "_vector_kernel", kind_of_product),
        (linear, "_matrix_kernel", lambda *arguments, **constants: "matrix"),
        (linear, "_sum_splits_kernel", lambda *arguments, **constants: "sum_splits"),
    ):
        monkeypatch.setattr(module, name, Recorder(launched, kind))
    for module in (paged_attention, linear):
        monkeypatch.setattr(module, "card_of", lambda device: card)
    nothing = {name: lambda *arguments, **options: (None, None) for name in vars(gpu_correct.kernels)}
    real = {"paged_attention": paged_attention.paged_attention, "packed_linear": linear.packed_linear}
    monkeypatch.setattr(gpu_correct, "kernels", SimpleNamespace(**nothing | real))
    for name in ("rms_norm", "add_rms_norm", "silu_and_mul", "packed_linear", "write_kv", "rope_and_write_kv"):
        monkeypatch.setattr(reference, name, nothing["rms_norm"])
    monkeypatch.setattr(reference, "paged_attention", nothing["rms_norm"])
    monkeypatch.setattr(reference, "close_blocks", nothing["rms_norm"])
    for name in ("near", "same"):
        monkeypatch.setattr(gpu_correct.Comparison, name, lambda *arguments, **options: row("", 0.0, "compared"))
    rows = list(gpu_correct.compare_all(torch.device("cpu"), native_dtype(card.arch), 1, is_thorough=True))
    assert {found["unit"] for found in rows} == {"compared"}, "none failed"
    wanted = {"short", "mixed", "chunk", "split", "merge", "sum_splits", "matrix", "product, split"}
    assert wanted | {"vector of 3 steps"} <= launched


@pytest.mark.slow
def test_processes_share_the_cases(tmp_path: Path) -> None:
    one = run_on_a_bare_machine("--tiny", "--seed", "3", "correct", "--share", "0", "2", folder=tmp_path)
    assert one.returncode == 0, one.stderr
    alone = json.loads(one.stdout.splitlines()[-1])["rows"]
    both = run_on_a_bare_machine("--tiny", "--seed", "3", "--jobs", "2", "correct", folder=tmp_path)
    assert both.returncode == 0, both.stderr
    rows = json.loads(both.stdout.splitlines()[-1])["rows"]
    names = [row["what"] for row in rows]
    assert len(alone) < len(rows)
    assert {row["what"] for row in alone} < set(names)
    assert len(names) == len(set(names))
    assert {"rms_norm", "keep_best, weights left over"} <= set(names)


class Dying:
    """One of two processes: the first compares a kernel if it is to, the second dies."""

    returncode = -11

    def __init__(self, command: list[str], *, stderr: TextIO, **options: object) -> None:
        index, output = command[command.index("--share") + 1], Path(command[-1])
        if index == "0":
            compared = {"part": "correct", **row("rms_norm", 0.001, "largest error")}
            output.write_text(json.dumps({"complete": True, "rows": [compared] if "correct" in command else []}))
        print("illegal memory access", file=stderr, flush=True)

    def kill(self) -> None: ...
    def wait(self) -> None: ...


def test_a_process_that_dies_is_a_fault_of_what_it_compared_and_the_others_count(
    here: Here, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": Dying}))
    monkeypatch.setitem(gpu_parts.PARTS, "linear", lambda check: iter(()))
    assert here("--tiny", "--jobs", "2", "correct", "linear") == 1
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["what"] for row in report["rows"]] == ["rms_norm"]
    assert report["failed"] == {"correct": "a process ended with -11: illegal memory access"}


def test_what_processes_found_counts_when_the_run_is_cut_while_they_compare(
    here: Here, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Ended(Dying):
        def wait(self) -> None:
            if not seen:
                seen.append(True)
                os.kill(os.getpid(), signal.SIGTERM)

    seen: list[bool] = []
    output = tmp_path / "figures.json"
    monkeypatch.setattr(gpu_check, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": Ended}))
    with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
        here("--tiny", "--jobs", "2", "correct", "--output", str(output))
    report = json.loads(output.read_text())
    assert [found["what"] for found in report["rows"]] == ["rms_norm"]
    assert report["complete"] is False


def test_a_process_that_dies_while_it_compiles_ahead_is_told_and_is_no_parts_fault(
    here: Here, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": Dying}))
    monkeypatch.setitem(gpu_parts.PARTS, "linear", lambda check: iter([row("int4", 1.0, "GB/s")]))
    assert here("--tiny", "--jobs", "2", "linear") == 0
    output = capsys.readouterr()
    report = json.loads(output.out.splitlines()[-1])
    assert ([row["what"] for row in report["rows"]], report["failed"]) == (["int4"], {})
    assert "a process ended with -11: illegal memory access" in output.err
