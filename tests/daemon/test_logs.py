"""Log lines on a terminal and in the journal."""

import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from pagedd.client.protocol import PROTOCOL_VERSION, Failed
from pagedd.daemon import logs

from .served import serving


@pytest.fixture(autouse=True)
def root_logger_restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def write(log_format: str, level: str = "info") -> tuple[io.StringIO, logging.Logger]:
    stream = io.StringIO()
    logs.setup(level, log_format, stream)
    return stream, logging.getLogger("pagedd.daemon.server")


def test_a_line_for_people_has_time_level_place_and_request() -> None:
    stream, log = write("human")
    log.warning("slow %s", "client", extra={"request_id": "1f"})
    time_of_day, line = stream.getvalue().split(" ", 1)
    assert len(time_of_day) == len("12:34:56.789")
    assert line == "WARNING server: slow client [request 1f]\n"


def test_a_line_for_the_journal_has_its_priority_and_request() -> None:
    stream, log = write("journald")
    log.error("broke", extra={"request_id": "1f"})
    assert stream.getvalue() == "<3>server: broke request_id=1f\n"


def test_every_line_of_a_trace_keeps_its_priority_in_the_journal() -> None:
    stream, log = write("journald")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        log.exception("broke")
    lines = stream.getvalue().splitlines()
    assert len(lines) > 4
    assert all(line.startswith("<3>") for line in lines)


def test_a_line_for_programs_is_one_object_with_its_trace_and_request() -> None:
    stream, log = write("json")
    log.warning("slow %s\n%s", "client", "\udcff", extra={"request_id": "1f"})
    try:
        raise ValueError("two\nlines")
    except ValueError:
        log.exception("broke")
    slow, broke = map(json.loads, stream.getvalue().splitlines())
    assert datetime.fromisoformat(slow.pop("time")).tzinfo is UTC
    assert slow == {"level": "warning", "logger": "server", "message": "slow client\n\udcff", "request_id": "1f"}
    assert broke["trace"].endswith("ValueError: two\nlines")
    assert "request_id" not in broke


def test_the_last_words_of_a_daemon_that_logs_objects_are_one_too(tmp_path: Path) -> None:
    flags = ["--log-format", "json", "--model", "/absent.gguf", "--runtime-dir", str(tmp_path)]
    command = [sys.executable, "-P", "-m", "pagedd.daemon.cli", *flags]
    ended = subprocess.run(command, stderr=subprocess.PIPE, check=False)
    last = json.loads(ended.stderr)
    assert (ended.returncode, last["level"]) == (os.EX_UNAVAILABLE, "critical")
    assert last["message"].startswith("model_unavailable: '/absent.gguf'")


def test_lines_below_the_level_are_not_written() -> None:
    stream, log = write("human", level="error")
    log.warning("unheard")
    assert stream.getvalue() == ""


@pytest.mark.parametrize(("level", "priority"), [(10, 7), (20, 6), (30, 4), (40, 3), (50, 2)])
def test_levels_map_to_the_journals_priorities(level: int, priority: int) -> None:
    stream, log = write("journald", level="debug")
    log.log(level, "x")
    assert stream.getvalue() == f"<{priority}>server: x\n"


def test_the_journal_is_told_apart_from_an_inherited_variable(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as stream:
        status = os.fstat(stream.fileno())
        assert logs.writes_to_journal(stream, {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"})
        assert not logs.writes_to_journal(stream, {"JOURNAL_STREAM": "1:2"})
        assert not logs.writes_to_journal(stream, {})
    assert not logs.writes_to_journal(io.StringIO(), {"JOURNAL_STREAM": "1:2"})


@pytest.mark.parametrize("formatter", [logs.HumanFormatter(), logs.JournaldFormatter()])
def test_what_would_steer_a_terminal_is_spelled_out(formatter: logging.Formatter) -> None:
    record = logging.LogRecord("pagedd.x", logging.INFO, "", 0, "a %s\tb\nc", ("\x1b[2J\r\x9b\x00\x7f",), None)
    line = formatter.format(record)
    assert "a \\x1b[2J\\x0d\\x9b\\x00\\x7f\tb\n" in line
    assert line.splitlines()[1].endswith("c")


async def test_a_refusal_that_quotes_its_message_is_in_no_log(
    socket_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with serving(socket_folder) as served, served.client() as client:
        for message in ({"type": "my secret", "id": "a"}, {"type": "chat", "id": "b", "messages": [{"my secret": 1}]}):
            await client.socket.send_multipart([PROTOCOL_VERSION, msgspec.msgpack.encode(message)])
            assert isinstance(await client.hear_end(), Failed)
    assert "invalid_value" in caplog.text
    assert "secret" not in caplog.text
