"""The rules of the soak see what is wrong, and a short soak finds nothing."""

from pathlib import Path

import pytest

from pagedd.bench.soak.__main__ import main
from pagedd.bench.soak.held import Held
from pagedd.bench.soak.ledger import Ends, Ledger
from pagedd.bench.soak.log_lines import unexplained


def test_each_request_has_one_end_and_nothing_comes_after_it() -> None:
    ledger = Ledger()
    ends = Ends(ledger)
    ends.sent("a")
    ends.accepted("a")
    ends.heard("a")
    ends.ended("a")
    assert ledger.wrong == []
    ends.heard("a")
    ends.ended("a")
    ends.accepted("a")
    assert ledger.wrong == [
        "a produced text after its end",
        "a ended twice",
        "a was accepted twice, or after its end",
    ]


def test_a_right_request_may_fail_by_an_injected_fault_and_not_by_another() -> None:
    ledger = Ledger()
    ledger.failed("engine_died", "SIGKILL")
    ledger.failed("client_too_slow", "unread", is_slow=True)
    assert ledger.wrong == []
    ledger.failed("client_too_slow", "unread")
    ledger.failed("internal", "a trace")
    ledger.refused(200, "invalid_value")
    assert len(ledger.wrong) == 3


def test_a_line_that_no_fault_explains_is_found_with_its_trace() -> None:
    log = "\n".join(
        (
            "12:00:00.000 INFO    server: stopped",
            "12:00:00.000 ERROR   engine_lives: the engine process (pid 7) was ended by SIGKILL; starting another in 1",
            "  a trace that belongs to it",
            "12:00:01.000 ERROR   service: a request broke [request 1f]",
            "Traceback (most recent call last):",
            "12:00:02.000 INFO    server: stopped",
        )
    )
    assert unexplained(log) == [
        "12:00:01.000 ERROR   service: a request broke [request 1f]\nTraceback (most recent call last):"
    ]


def test_a_descriptor_or_a_process_that_stays_is_told() -> None:
    before = Held(100 << 20, 30, 12, 3, 200 << 20, 10, 4)
    assert Held(101 << 20, 30, 14, 2, 190 << 20, 10, 4).grown_beyond(before) == []
    assert Held(200 << 20, 31, 12, 4, 200 << 20, 10, 4).grown_beyond(before) == [
        f"rss_bytes: {100 << 20} before, {200 << 20} after, {48 << 20} allowed",
        "num_descriptors: 30 before, 31 after, 0 allowed",
        "num_children: 3 before, 4 after, 0 allowed",
    ]


# Each fault once: the engine is killed, hung and stopped, the disk is full, clients crowd, the settings are read anew.
@pytest.mark.slow
def test_a_daemon_is_after_a_minute_of_faults_as_it_was_before(
    model_gguf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["--seconds", "45", "--interval", "2", "--model", str(model_gguf)])
    output = capsys.readouterr()
    assert status == 0, output.err + output.out
