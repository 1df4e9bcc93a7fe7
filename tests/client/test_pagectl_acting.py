"""What `pagectl` does to a daemon through its admin socket."""

import sys
from pathlib import Path

import pytest

from pagedd.client.protocol import Cancel, Load, SetPriority, Sleep, Wake
from pagedd.client.questions import EvictPrefix

from .fake_daemon import FakeDaemon
from .pagectl_calls import Run


@pytest.mark.parametrize(("command", "message"), [("sleep", Sleep), ("wake", Wake)])
def test_the_engine_is_put_to_sleep_and_woken(daemon: FakeDaemon, run: Run, command: str, message: type) -> None:
    assert run(command) == 0
    assert isinstance(daemon.hear(message, "admin"), message)


def test_a_command_without_an_answer_says_at_a_terminal_that_it_is_done(
    daemon: FakeDaemon, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("wake") == 0
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert run("wake") == 0
    assert capsys.readouterr() == ("", "the engine is starting, unless it was awake\n")


def test_a_model_is_loaded_by_its_name_or_by_its_whole_path(
    daemon: FakeDaemon, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    assert run("load", "mine", "--name", "m") == 0
    asked = daemon.hear(Load, "admin")
    assert (asked.model, asked.served_name) == (str(tmp_path / "mine"), "m")
    assert run("load", "org/model") == 0
    assert daemon.hear(Load, "admin").model == "org/model"


def test_a_prefix_is_evicted_through_the_admin_socket(
    daemon: FakeDaemon, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("evict", "d1") == 0
    assert daemon.hear(EvictPrefix, socket="admin").digest == "d1"
    assert capsys.readouterr().out == "2 blocks are free, 0 are in use and stay\n"


def test_what_the_disk_keeps_of_an_evicted_prefix_is_no_success(
    daemon: FakeDaemon, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("evict", "stuck") == 1
    said = capsys.readouterr()
    assert "3 lie in files on the disk that cannot be removed, and are back after a restart" in said.err
    assert said.out.endswith("the disk has lost 2 more, of other prefixes, that lay in the same files\n")


def test_a_priority_is_set_through_the_admin_socket(daemon: FakeDaemon, run: Run) -> None:
    assert run("priority", "r1", "20") == run("priority", "r1", "-20") == 0
    said = [daemon.hear(SetPriority, socket="admin") for _ in range(2)]
    assert [(message.target, message.priority) for message in said] == [("r1", 20), ("r1", -20)]


def test_cancel_goes_to_the_admin_socket(daemon: FakeDaemon, run: Run) -> None:
    assert run("cancel", "r1") == 0
    assert daemon.hear(Cancel, "admin").target == "r1"
