"""A daemon for a benchmark: what went wrong is shown, and nothing stays behind."""

import os
from pathlib import Path

import pytest

from pagedd.bench.daemon_process import running_daemon


async def test_a_daemon_that_does_not_start_is_an_error_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with pytest.raises(RuntimeError, match="unknown_setting"):
        async with running_daemon(["--no-such-flag"]):
            pytest.fail("it cannot be ready")
    assert os.listdir(tmp_path) == []


async def test_a_daemon_has_the_environment_that_it_is_given() -> None:
    with pytest.raises(RuntimeError, match="PAGEDD_HTTP_PORT"):
        async with running_daemon([], environ={"PAGEDD_HTTP_PORT": "none"}):
            pytest.fail("it cannot be ready")
