"""`pagedd tune` on the real model, in little time, and what it leaves behind."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pagedd.daemon.tune import command
from pagedd.daemon.tune.agreement import agreement
from pagedd.daemon.tune.trial import Trial, TrialResult

from ..conftest import RunningDaemon

TUNE = [sys.executable, "-P", "-m", "pagedd.client.pagectl", "tune", "--num-threads", "1"]


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    inherited = {name: text for name, text in os.environ.items() if not name.startswith("PAGEDD_")}
    return inherited | {"PAGEDD_RUNTIME_DIR": str(tmp_path / "run")}


def test_it_stops_when_its_time_is_over_and_prints_what_it_tried(
    environ: dict[str, str], model_gguf: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    log.write_text('{"prompt_tokens": 8, "output_tokens": 4}\n')
    out = tmp_path / "found.toml"
    flags = ["--model", str(model_gguf), "--seconds", "1", "--load", str(log), "--users", "2", "--out", str(out)]
    done = subprocess.run([*TUNE, *flags], env=environ, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == command.EXIT_UNDECIDED
    assert "step" in done.stdout
    assert "as configured" in done.stdout
    assert "the log has lengths alone" in done.stderr
    assert "1 s are over" in done.stderr
    assert "no setting was compared with the settings as they are" in done.stdout
    assert f"{out} is not written" in done.stderr
    assert not out.exists()


def test_an_interrupt_leaves_no_process_behind(environ: dict[str, str], model_gguf: Path) -> None:
    process = subprocess.Popen(
        [*TUNE, "--model", str(model_gguf)], env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    itself = psutil.Process(process.pid)
    deadline_s = time.monotonic() + 60
    while not (children := itself.children()):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    assert psutil.wait_procs(children, timeout=10)[1] == []


def test_an_interrupt_keeps_what_was_decided_and_leaves_the_settings_file_alone(
    model_gguf: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    def small_blocks_are_quick(trial: Trial, timeout_s: float) -> TrialResult:
        if trial.config.max_num_seqs != 32:
            raise KeyboardInterrupt
        quick = trial.config.block_size == 8
        return TrialResult(output_tokens_per_s=200.0 if quick else 100.0, max_num_batched_tokens=512)

    monkeypatch.setattr(command, "run_trial", small_blocks_are_quick)
    monkeypatch.setenv("PAGEDD_RUNTIME_DIR", str(tmp_path / "run"))
    out, settings = tmp_path / "found.toml", tmp_path / "pagedd.toml"
    said: list[str] = []
    flags = ["--model", str(model_gguf), "--out", str(out), "--write", "--settings-file", str(settings)]
    assert command.tune(flags, said.append) == 130
    assert capsys.readouterr().out.endswith("\nblock_size = 8\n")
    assert out.read_text() == "block_size = 8\n"
    assert not settings.exists()
    assert "interrupted; what was found until then holds" in said


@pytest.mark.parametrize("num_lines", [4, 1000], ids=["a trial's line", "the end"])
def test_what_was_found_is_written_also_where_standard_output_takes_no_more(
    model_gguf: Path, tmp_path: Path, monkeypatch, num_lines: int
) -> None:
    printed: list[str] = []

    def small_blocks_are_quick(trial: Trial, timeout_s: float) -> TrialResult:
        quick = trial.config.block_size == 8
        return TrialResult(output_tokens_per_s=200.0 if quick else 100.0, max_num_batched_tokens=512)

    def print_until_full(line: str, **_: object) -> None:
        if len(printed) == num_lines or line.startswith("\n"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        printed.append(line)

    monkeypatch.setattr(command, "run_trial", small_blocks_are_quick)
    monkeypatch.setattr(command, "print", print_until_full, raising=False)
    monkeypatch.setenv("PAGEDD_RUNTIME_DIR", str(tmp_path / "run"))
    out, settings = tmp_path / "found.toml", tmp_path / "pagedd.toml"
    flags = ["--model", str(model_gguf), "--out", str(out), "--write", "--settings-file", str(settings)]
    with pytest.raises(OSError, match="No space left"):
        command.tune(flags, printed.append)
    assert "block_size = 8\n" in out.read_text()
    assert settings.read_text() == out.read_text()


def test_beside_a_running_daemon_it_refuses(serving_daemon: RunningDaemon, environ: dict[str, str]) -> None:
    environ["PAGEDD_RUNTIME_DIR"] = str(serving_daemon.endpoints.directory)
    done = subprocess.run(TUNE, env=environ, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == os.EX_TEMPFAIL
    assert "already_running" in done.stderr
    assert "--anyway" in done.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--users", "0"), "0, allowed are 1 to 65536"),
        (("--seconds", "nan"), "nan, allowed are 1 to 86400"),
        (("--out", "/nowhere/found.toml"), "/nowhere/found.toml cannot be written: no such directory"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_tried(environ: dict[str, str], flags, said: str) -> None:
    done = subprocess.run([*TUNE, *flags], env=environ, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode
    assert said in done.stderr
    assert not done.stdout


def test_agreement_is_the_share_of_equal_choices() -> None:
    assert agreement([1, 2, 3, 4], [1, 2, 0, 4]) == 0.75
