"""Log lines: for a person on a terminal, for journald with its priority prefix, or for programs as JSON.

Owns the formats. A line about a request carries its id: `log.info("…", extra={"request_id": request_id})`.
"""

import json
import logging
import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TextIO

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("auto", "human", "journald", "json")

# What would move a terminal's cursor, or hide a line from whoever reads the journal; a trace keeps its lines.
_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def setup(level: str, log_format: str, stream: TextIO | None = None) -> None:
    """Sends every log line of this process to `stream` (standard error). `level` and `log_format` are settings."""
    stream = stream or sys.stderr
    if log_format == "auto":
        log_format = "journald" if writes_to_journal(stream, os.environ) else "human"
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_FORMATTERS[log_format]())
    logging.basicConfig(handlers=[handler], force=True)
    set_level(level)


def set_level(level: str) -> None:
    """The least severe line that is written from now on."""
    logging.getLogger().setLevel(level.upper())
    # One line per request belongs to whoever asks for debug output; the daemon logs its own.
    logging.getLogger("aiohttp.access").setLevel(logging.DEBUG if level == "debug" else logging.WARNING)


def writes_json() -> bool:
    """Every line of this process is to be an object, its last words too."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


def writes_to_journal(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """`JOURNAL_STREAM` is inherited by children whose output goes elsewhere, so device and inode are compared
    (systemd.exec(5))."""
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


class HumanFormatter(logging.Formatter):
    """`12:34:56.789 INFO    server: message [request 1f…]`."""

    default_msec_format = "%s.%03d"

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).translate(_ESCAPES)

    default_time_format = "%H:%M:%S"

    def formatMessage(self, record: logging.LogRecord) -> str:
        request_id = getattr(record, "request_id", None)
        suffix = f" [request {request_id}]" if request_id else ""
        return f"{self.formatTime(record)} {record.levelname:<7} {_short(record.name)}: {record.message}{suffix}"


class JournaldFormatter(logging.Formatter):
    """`<6>server: message request_id=1f…`: journald strips the prefix and files the line under that priority."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        request_id = getattr(record, "request_id", None)
        suffix = f" request_id={request_id}" if request_id else ""
        return f"{_short(record.name)}: {record.message}{suffix}"

    def format(self, record: logging.LogRecord) -> str:
        prefix = f"<{_syslog_priority(record.levelno)}>"
        # Each line of a trace is a journal entry of its own, and needs the prefix to keep its priority.
        return "\n".join(prefix + line for line in super().format(record).translate(_ESCAPES).splitlines())


class JsonFormatter(logging.Formatter):
    """`{"time":"2026-01-31T12:34:56.789Z","level":"info","logger":"server","message":…}`, one object a line.

    With `request_id` and `trace` where there are such.
    """

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = {
            "time": time,
            "level": record.levelname.lower(),
            "logger": _short(record.name),
            "message": record.getMessage(),
        }
        if request_id := getattr(record, "request_id", None):
            line["request_id"] = request_id
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        # ASCII alone: bytes of a name that are not UTF-8 come as lone surrogates, which no other encoder takes.
        return json.dumps(line, separators=(",", ":"))


_FORMATTERS: Mapping[str, type[logging.Formatter]] = {
    "human": HumanFormatter,
    "journald": JournaldFormatter,
    "json": JsonFormatter,
}


def _syslog_priority(level: int) -> int:
    if level >= logging.CRITICAL:
        return 2
    if level >= logging.ERROR:
        return 3
    if level >= logging.WARNING:
        return 4
    return 6 if level >= logging.INFO else 7


def _short(name: str) -> str:
    return name.removeprefix("pagedd.").removeprefix("daemon.")
