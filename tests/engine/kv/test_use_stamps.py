"""Stamps of files: one order, and nobody waits for another's disk."""

import os
import threading
import time
from pathlib import Path

import pytest

from pagedd.engine.kv.use_stamps import UseStamps


def test_who_stamps_does_not_wait_for_another_whose_disk_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    utime, is_asked, may_answer = os.utime, threading.Event(), threading.Event()

    def hang_once(path: Path, ns: tuple[int, int]) -> None:
        if path.name == "slow":
            is_asked.set()
            assert may_answer.wait(60)
        utime(path, ns=ns)

    for name in ("slow", "quick"):
        (tmp_path / name).touch()
    monkeypatch.setattr(os, "utime", hang_once)
    uses = UseStamps()
    hanging = threading.Thread(target=uses.stamp, args=(tmp_path / "slow",))
    hanging.start()
    assert is_asked.wait(60)
    quick = threading.Thread(target=uses.stamp, args=(tmp_path / "quick",))
    quick.start()
    quick.join(20)
    is_done = not quick.is_alive()
    may_answer.set()
    hanging.join()
    assert is_done
    assert (tmp_path / "slow").stat().st_mtime_ns < (tmp_path / "quick").stat().st_mtime_ns


def test_a_stamp_is_after_all_before_it_though_the_clock_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: 1000)
    uses = UseStamps()
    for name in "ab":
        (tmp_path / name).touch()
        uses.stamp(tmp_path / name)
    assert [(tmp_path / name).stat().st_mtime_ns for name in "ab"] == [1000, 1001]
