"""The command itself: its arguments, its statuses, its version, and the commands of others that it runs."""

import os
import sys
from pathlib import Path

import pytest

from pagedd.client import pagectl
from pagedd.client.protocol import Failed, Generate

from .fake_daemon import FakeDaemon
from .pagectl_calls import Run


def test_a_log_is_replayed_and_summed_up(
    daemon: FakeDaemon, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    log.write_text('{"prompt_token_ids": [1, 2], "output_tokens": 3, "priority": 5}\n')
    assert run("replay", str(log)) == 0
    asked = daemon.hear(Generate)
    assert (asked.prompt_token_ids, asked.sampling.max_tokens, asked.priority) == ([1, 2], 3, 5)
    assert capsys.readouterr().out.startswith("answered 1 in ")
    for file, speed in ((str(log), "0"), (str(tmp_path / "none"), "1")):
        assert run("replay", file, "--speed", speed) == pagectl.EXIT_REFUSED


def test_a_refusal_is_one_line_and_a_status(daemon: FakeDaemon, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for code, status in [
        ("prompt_too_long", 1),
        ("queue_full", 75),
        ("engine_loading", 75),
        ("forbidden", 77),
        ("model_unavailable", 69),
    ]:
        daemon.answer = lambda message, code=code: [Failed(id=message.id, code=code, message="so it is")]
        assert run("generate", "x", "--no-wait") == status
        assert capsys.readouterr().err == f"pagectl: {code}: so it is\n"


def test_without_a_daemon_it_says_what_to_do(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["generate", "x"],
        ["ps"],
        ["blocks"],
        ["stats"],
        ["stats", "--watch"],
        ["cancel", "r1"],
        ["priority", "r1", "5"],
    ):
        assert run(*arguments) == 69
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("pagectl: daemon_unreachable: ")
        assert "systemctl start pagedd" in err


@pytest.mark.parametrize(
    "arguments", [[], ["nonsense"], ["generate", "x", "--n", "two"], ["cancel"], ["priority", "r1", "high"]]
)
def test_a_wrong_command_line_is_status_2(run: Run, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        run(*arguments)
    assert exit.value.code == 2
    assert "usage: pagectl" in capsys.readouterr().err


def test_a_quota_that_is_used_up_is_a_reason_to_try_again_later(
    daemon: FakeDaemon, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.answer = lambda message: [Failed(id=message.id, code="over_quota", message="try again", retry_after_s=2.0)]
    assert run("generate", "x") == os.EX_TEMPFAIL
    assert "over_quota: try again" in capsys.readouterr().err


def test_version_names_both_and_is_no_failure_without_a_daemon(
    daemon: FakeDaemon, run: Run, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("version") == 0
    assert capsys.readouterr().out == f"pagectl 0.1.0\npagedd  0.1.0 (ready) at {directory}\n"
    daemon.stop()
    assert run("version") == 0
    assert f"pagedd  not running at {directory} (daemon_unreachable)" in capsys.readouterr().out


def test_version_is_a_flag_too(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PAGEDD_RUNTIME_DIR", str(directory))
    assert pagectl.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("pagectl 0.1.0\n")


def test_pull_runs_the_daemons_own_command(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Replaced(Exception):
        pass

    def execv(program: str, arguments: list[str]) -> None:
        assert program == sys.executable
        assert arguments[1:] == ["-P", "-m", "pagedd.daemon.cli", "pull", "smollm2"]
        raise Replaced

    monkeypatch.setattr("os.execv", execv)
    with pytest.raises(Replaced):
        run("pull", "smollm2")


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        (["tune", "--write"], ["--write"]),
        (["--runtime-dir", "/run/x", "tune"], ["--runtime-dir", "/run/x"]),
        (["--runtime-dir=/run/x", "tune", "--users", "3"], ["--users", "3", "--runtime-dir", "/run/x"]),
        (["--runtime-d", "/run/x", "tune"], ["--runtime-dir", "/run/x"]),
    ],
)
def test_tune_is_told_all_flags(monkeypatch: pytest.MonkeyPatch, given: list[str], passed: list[str]) -> None:
    executed: list[list[str]] = []

    def execv(program: str, arguments: list[str]) -> None:
        executed.append(arguments)
        raise SystemExit

    monkeypatch.setattr("os.execv", execv)
    with pytest.raises(SystemExit):
        pagectl.main(given)
    assert executed == [[sys.executable, "-P", "-m", "pagedd.daemon.cli", "tune", *passed]]
