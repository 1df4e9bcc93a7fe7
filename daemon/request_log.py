"""Writes the log of requests that `pagectl replay` and `pagedd tune --load` read, where the settings name a file.

Owns the file: who may read it, when it is full. What a line holds is `client/request_log.py`'s. A disk that takes
nothing costs the log its lines and no request anything.
"""

import errno
import fcntl
import logging
import os
import stat
from pathlib import Path

import msgspec

from pagedd.client.request_log import LoggedRequest
from pagedd.daemon.files import reason
from pagedd.daemon.live_requests import LiveEntry
from pagedd.daemon.wall_clock import unix_s

log = logging.getLogger(__name__)

# A full file becomes FILE.1, in place of the one before.
MAX_BYTES = 64 << 20


def why_unwritable(path: Path) -> str | None:
    """What keeps this user from writing the log there, None when nothing does. Makes nothing."""
    nearest = next(place for place in (path, *path.absolute().parents) if os.path.exists(place))
    if nearest == path:
        if not path.is_file():
            return "it is no regular file"
    elif not nearest.is_dir():
        return f"{nearest} is no folder"
    may_write = os.access(nearest, os.W_OK if nearest == path else os.W_OK | os.X_OK)
    return None if may_write else f"{nearest}: {os.strerror(errno.EACCES)}"


class RequestLog:
    """One event loop appends; a line goes to the kernel's cache, which takes microseconds."""

    def __init__(self, path: Path | None, max_bytes: int = MAX_BYTES) -> None:
        """`path` None writes nothing."""
        self._path = path
        self._max_bytes = max_bytes
        self._fd: int | None = None
        self._num_bytes = 0
        self._has_failed = False
        self._last_arrival_s: float | None = None  # of the line before, by `time.monotonic`

    def announce(self) -> None:
        """Says in the daemon's log where the requests go, or why they cannot."""
        if self._path is None:
            return
        try:
            self._open(self._path, 0)
        except OSError as error:
            self._say_failed(error)
        else:
            log.info("requests are logged in %s", self._path)

    def ended(self, entry: LiveEntry) -> None:
        """A request is over; one without an answer is not logged. Raises nothing."""
        if entry.request.num_output_tokens > 0:
            arrival_s, last_s = entry.times.arrival_s, self._last_arrival_s
            if self.add(_logged(entry, None if last_s is None else arrival_s - last_s)):
                self._last_arrival_s = arrival_s

    def add(self, request: LoggedRequest) -> bool:
        """False when it could not be written, or need not be. Raises nothing."""
        if self._path is None:
            return False
        line = msgspec.json.encode(request) + b"\n"
        try:
            self._open(self._path, len(line))
            self._write(line)
        except OSError as error:
            self._say_failed(error)
            self.close()
        else:
            self._has_failed = False
        return not self._has_failed

    def _say_failed(self, error: OSError) -> None:
        """Once, until a line could be written again."""
        if not self._has_failed:
            log.warning("%s takes no requests until it can be written again: %s", self._path, reason(error))
        self._has_failed = True

    def close(self) -> None:
        """The next line opens the file anew, which may be another one by then."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self, path: Path, num_new: int) -> None:
        if self._fd is not None and self._num_bytes + num_new > self._max_bytes:
            self.close()
            path.replace(path.with_name(f"{path.name}.1"))
        if self._fd is None:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(path, flags, 0o600)
            try:
                _take(descriptor)
                self._num_bytes = os.fstat(descriptor).st_size
            except OSError:
                os.close(descriptor)
                raise
            self._fd = descriptor

    def _write(self, line: bytes) -> None:
        """The whole line or nothing of it: a torn one would make the log unreadable."""
        assert self._fd is not None
        written = os.write(self._fd, line)
        if written < len(line):
            os.ftruncate(self._fd, self._num_bytes)
            raise OSError(f"{written} of {len(line)} bytes could be written; is the disk full?")
        self._num_bytes += written


def _take(descriptor: int) -> None:
    """Makes the file this daemon's alone: two would cut each other's lines. Raises `OSError`."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise OSError("it is no regular file")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OSError("another daemon writes to it; give each its own request_log") from None
    os.fchmod(descriptor, 0o600)  # one that was there may have been open to others


def _logged(entry: LiveEntry, after_s: float | None) -> LoggedRequest:
    request = entry.request
    return LoggedRequest(
        time_s=round(unix_s(entry.times.arrival_s), 3),
        after_s=None if after_s is None else round(after_s, 3),
        prompt_tokens=request.num_prompt_tokens,
        prompt_token_ids=entry.prompt_token_ids,
        output_tokens=-(-request.num_output_tokens // request.num_choices),
        n=request.num_choices,
        priority=entry.message.priority,
    )
