"""A session in a file: written while a daemon is watched, shown again through the same `Source` as a daemon.

The file is gzip of a line of JSON, `{"format": 1, "pagedd": "0.1.0"}`, and then records: kind (1 byte: 0 a frame, 1 an
answer), seconds since the start (float64), length (uint32), all big-endian, and the frame (`client/stats_frame.py`) or
answer (`client/questions.py`) as it is on the wire. An answer's `id` is the question that it answers. Fields that a
message has gained since take their defaults, so older recordings replay; `format` changes only if that should ever not
be enough.
"""

import asyncio
import gzip
import json
import math
import struct
import time
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from io import BufferedIOBase
from pathlib import Path
from typing import BinaryIO, NoReturn, TypeVar, cast

import msgspec

from pagedd.client.errors import PageddError
from pagedd.client.protocol import DaemonMessage, decode_daemon, encode
from pagedd.client.questions import BlockDetail, Evicted, Prefixes, RequestText
from pagedd.client.stats_frame import StatsFrame, decode_stats
from pagedd.tui.feed import Update
from pagedd.tui.state import Link

FORMAT = 1
SUFFIX = ".pagetop"
DEMO = Path(__file__).with_name("demo.pagetop")

_RECORD = struct.Struct(">BdI")
_FRAME, _ANSWER = range(2)
# A record is about as large as a message of the daemon may be; more is a damaged file, not a reason to take memory.
_MAX_RECORD_BYTES = 64 << 20
_MAX_HEADER_BYTES = 4096
_FLUSH_INTERVAL_S = 1.0
_LONGEST_SILENCE_S = 10.0

_Answer = TypeVar("_Answer", BlockDetail, Prefixes, RequestText)


@dataclass(frozen=True, slots=True)
class Record:
    """One message and when it came, in seconds since the start of the recording."""

    at_s: float
    message: StatsFrame | DaemonMessage


class Recorder:
    """Writes a recording. A viewer that is killed loses the last second of it, not the file."""

    def __init__(self, path: Path, *, started_s: float) -> None:
        """Makes the file; `started_s` is the time of its beginning on the clock that `at_s` is given by.

        Raises `PageddError("invalid_setting")` when it exists or cannot be written.
        """
        self.path = path
        self._started_s = started_s
        try:
            self._raw: BinaryIO = path.open("xb")
        except OSError as error:
            raise PageddError(
                "invalid_setting", f"{path}: cannot be made ({error.strerror}); choose another file", field="record"
            ) from error
        # Frames are alike, so the fastest level takes nearly as much off as the best.
        self._file = gzip.GzipFile(fileobj=self._raw, mode="wb", compresslevel=1, mtime=0)
        self._flushed_s = started_s
        self._file.write(json.dumps({"format": FORMAT, "pagedd": version("pagedd")}).encode() + b"\n")

    def write(self, message: StatsFrame | DaemonMessage, now_s: float) -> None:
        """Raises `PageddError("invalid_setting")` when the disk is full, and then it is time to `close`."""
        kind = _FRAME if isinstance(message, StatsFrame) else _ANSWER
        payload = encode(message)
        with self._explained():
            self._file.write(_RECORD.pack(kind, max(0.0, now_s - self._started_s), len(payload)) + payload)
            if now_s - self._flushed_s >= _FLUSH_INTERVAL_S:
                self._file.flush()
                self._flushed_s = now_s

    def close(self) -> None:
        """Also when the end cannot be written, which raises as `write` does."""
        with self._explained():
            try:
                self._file.close()
            finally:
                self._raw.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = f"{self.path}: the recording has ended ({error.strerror}); choose another place"
            raise PageddError("invalid_setting", reason, field="record") from error


def read(path: Path) -> Iterator[Record]:
    """The records of a file in order. One that was cut off ends where it was cut.

    Raises `PageddError("invalid_setting")` when it is no recording, or one that this version cannot read.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for, and can be read only once
            _refuse(path, "it is no file")
        raw = path.open("rb")
    except OSError as error:
        raise PageddError("invalid_setting", f"{path}: cannot be read ({error.strerror})", field="replay") from error
    with raw, cast("BufferedIOBase", gzip.GzipFile(fileobj=raw)) as file:
        _check_header(path, file)
        before_s = 0.0
        while (record := _next_record(path, file)) is not None:
            if not before_s <= record.at_s < math.inf:
                _refuse(path, f"a record at {record.at_s} s after one at {before_s} s: the file is damaged")
            before_s = record.at_s
            yield record


def _check_header(path: Path, file: BufferedIOBase) -> None:
    try:
        header = json.loads(file.readline(_MAX_HEADER_BYTES))
        recorded_format, recorded_by = int(header["format"]), str(header["pagedd"])
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
        _refuse(path, "it is no recording of pagetop", error)
    if recorded_format < 1:
        _refuse(path, "it is no recording of pagetop")
    if recorded_format > FORMAT:
        _refuse(
            path,
            f"format {recorded_format}, written by pagedd {recorded_by}; this version reads up to {FORMAT}: update it",
        )


def _next_record(path: Path, file: BufferedIOBase) -> Record | None:
    try:
        head = file.read(_RECORD.size)
        if len(head) < _RECORD.size:
            return None
        kind, at_s, length = _RECORD.unpack(head)
        if kind not in (_FRAME, _ANSWER) or length > _MAX_RECORD_BYTES:
            _refuse(path, f"a record of kind {kind} and {length} bytes: the file is damaged")
        payload = file.read(length)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        # The viewer that wrote it was killed: what is whole is shown.
        return None
    except OSError as error:
        _refuse(path, f"cannot be read ({error.strerror})", error)
    if len(payload) < length:
        return None
    try:
        return Record(at_s, decode_stats(payload) if kind == _FRAME else decode_daemon(payload))
    except msgspec.DecodeError as error:
        _refuse(path, f"a message at {at_s:.1f} s that this version cannot read ({error})", error)


def _refuse(path: Path, reason: str, cause: Exception | None = None) -> NoReturn:
    raise PageddError("invalid_setting", f"{path}: {reason}", field="replay") from cause


class Replay:
    """A recording as a source. It answers what was asked while it was recorded; there is nobody to act on.

    A long silence, as while the viewer that recorded was stopped, is shown as a shorter one.
    """

    def __init__(self, path: Path, *, speed: float = 1.0, is_loop: bool = False, name: str | None = None) -> None:
        """`speed` 2 shows it in half the time. Raises as `read`, before anything is shown."""
        self.name = f"replay {path.name}" if name is None else name
        self.place = ""
        self.gives_every_frame = True
        self._path = path
        self._speed = speed
        self._is_loop = is_loop
        self._answers: dict[str, DaemonMessage] = {}
        if not any(isinstance(record.message, StatsFrame) for record in read(path)):
            _refuse(path, "it ends before the first picture")

    async def updates(self) -> AsyncIterator[Update]:
        while True:
            self._answers.clear()
            due_s, before_s = time.monotonic(), 0.0
            for record in read(self._path):
                due_s += min(record.at_s - before_s, _LONGEST_SILENCE_S) / self._speed
                before_s = record.at_s
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                if isinstance(record.message, StatsFrame):
                    yield record.message
                else:
                    self._answers[record.message.id] = record.message
            if not self._is_loop:
                yield Link("ended")
                return
            # As before the first frame: what follows is no continuation.
            yield Link()

    def learn(self, message: DaemonMessage) -> None:
        """Takes in an answer as if the recording had it here."""
        self._answers[message.id] = message

    async def previews(self) -> dict[str, str]:
        return {}  # The recorded rows have theirs.

    async def block(self, index: int) -> BlockDetail:
        return self._recorded(block_question(index), BlockDetail)

    async def prefixes(self) -> Prefixes:
        return self._recorded(PREFIXES_QUESTION, Prefixes)

    async def text(self, request_id: str) -> RequestText:
        return self._recorded(text_question(request_id), RequestText)

    async def cancel(self, request_id: str) -> None:
        self._refuse_to_act()

    async def set_priority(self, request_id: str, priority: int) -> None:
        self._refuse_to_act()

    async def evict_prefix(self, digest: str) -> Evicted:
        self._refuse_to_act()

    async def close(self) -> None:
        pass

    def _recorded(self, question: str, kind: type[_Answer]) -> _Answer:
        answer = self._answers.get(question)
        if not isinstance(answer, kind):
            raise PageddError("request_not_found", "the recording does not have this")
        return answer

    def _refuse_to_act(self) -> NoReturn:
        raise PageddError("forbidden", "this is a recording: there is no daemon to act on")


PREFIXES_QUESTION = "prefixes"


def block_question(index: int) -> str:
    return f"block {index}"


def text_question(request_id: str) -> str:
    return f"text {request_id}"
