"""What is kept of an engine that died."""

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from pagedd.daemon.crash_reports import MAX_KEPT, Crash, CrashReports, state_directory

CRASH = Crash(reason="it was ended by SIGSEGV", trace="", info=None, stats=None, in_flight=())


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    reports = CrashReports(tmp_path / "crashes")
    paths = [reports.keep(CRASH) for _ in range(MAX_KEPT + 3)]
    assert [path for path in paths if path is not None and path.exists()] == paths[3:]


def test_after_a_clock_was_set_back_the_newest_are_still_those_that_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports, when = CrashReports(tmp_path / "crashes"), datetime(2026, 1, 2, tzinfo=UTC)
    monkeypatch.setattr("pagedd.daemon.crash_reports.utc_now", lambda: when)
    paths = []
    for _ in range(MAX_KEPT + 3):
        paths.append(reports.keep(CRASH))
        when -= timedelta(hours=1)
    assert [path for path in paths if path is not None and path.exists()] == paths[3:]


def test_a_full_disk_costs_the_report_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "crashes").touch()
    assert CrashReports(tmp_path / "crashes").keep(CRASH) is None
    assert "no crash report could be kept" in caplog.text


def test_reports_that_a_full_disk_cuts_push_no_other_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports, really_open = CrashReports(tmp_path / "crashes"), os.open
    kept = [reports.keep(CRASH) for _ in range(MAX_KEPT)]

    def open_on_a_full_disk(path: Path, flags: int, mode: int) -> int:
        os.close(really_open(path, flags, mode))
        return really_open("/dev/full", os.O_WRONLY)

    monkeypatch.setattr("pagedd.daemon.crash_reports.os.open", open_on_a_full_disk)
    assert [reports.keep(CRASH) for _ in range(3)] == [None] * 3
    monkeypatch.undo()
    assert sorted((tmp_path / "crashes").iterdir()) == kept


def test_the_folder_is_systemds_or_the_users_own(tmp_path: Path) -> None:
    assert state_directory({"STATE_DIRECTORY": "/var/lib/pagedd:/var/lib/other"}) == Path("/var/lib/pagedd")
    assert state_directory({"XDG_STATE_HOME": "/s", "STATE_DIRECTORY": ""}) == Path("/s/pagedd")
    assert state_directory({}) == Path(os.path.expanduser("~")) / ".local/state/pagedd"
