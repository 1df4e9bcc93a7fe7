"""The thread that waits for the disk: in order, the urgent first, and no job ends it."""

import threading

import pytest

from pagedd.engine.kv.disk_thread import DiskThread


def test_jobs_are_done_in_order_and_urgent_ones_before_all_that_wait() -> None:
    starts, done = [], []
    thread = DiskThread(starts.append)
    thread.ask([lambda: done.append("a"), lambda: done.append("b")])
    thread.ask([lambda: done.append("c"), lambda: done.append("d")], is_urgent=True)
    (run,) = starts
    run()
    assert done == ["c", "d", "a", "b"]
    thread.ask([])
    assert len(starts) == 1, "nothing to do is no reason for a thread"


def test_a_job_that_fails_costs_no_other(caplog: pytest.LogCaptureFixture) -> None:
    done = []
    thread = DiskThread()
    thread.ask([lambda: 1 / 0, lambda: done.append("next")])
    thread.finish(60)
    assert done == ["next"]
    assert "the disk could not be asked" in caplog.text
    assert not thread.is_stuck


def test_nobody_is_asked_for_what_there_was_no_thread_for() -> None:
    done = []

    def refuse(target: object) -> None:
        raise RuntimeError("can't start new thread")

    thread = DiskThread(refuse)
    with pytest.raises(OSError, match="no thread to ask the disk: can't start new thread"):
        thread.ask([lambda: done.append("lost")])
    thread._start_thread = lambda target: threading.Thread(target=target).start()
    thread.ask([lambda: done.append("next")])
    thread.finish(60)
    assert done == ["next"]
