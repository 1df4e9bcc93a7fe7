"""Makes the runtime directory this daemon's own: one daemon a directory, no stale sockets, exact modes.

Which directory it is and what the sockets are called is decided in `pagedd.client.endpoints`.
"""

import fcntl
import os
import socket
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pagedd.client.endpoints import Endpoints, create_directory
from pagedd.client.errors import PageddError

REQUESTS_MODE = 0o660
ADMIN_MODE = 0o600


class RuntimeLock:
    """Held for as long as this process owns `endpoints`. The kernel drops it with the process, however that ends."""

    def __init__(self, endpoints: Endpoints, inherited: Collection[Path] = ()) -> None:
        """`inherited` are sockets that somebody else holds for this process: they are left as they are.

        Makes the directory, takes the lock and removes sockets that nobody answers on.

        Raises `PageddError`: `already_running` when another daemon has the directory, `invalid_setting` when the
        directory cannot be made or is not safe to use.
        """
        all_sockets = (endpoints.requests, endpoints.stats, endpoints.admin, endpoints.http, endpoints.engine)
        self._sockets = [path for path in all_sockets if path not in inherited]
        try:
            create_directory(endpoints)
            # Never removed: whoever waits on a removed file would hold a lock that nobody else can see.
            self._fd = os.open(endpoints.directory / "pagedd.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise PageddError(
                "invalid_setting",
                f"runtime directory {endpoints.directory}: {error.strerror}; choose another with --runtime-dir",
                field="runtime_dir",
            ) from error
        try:
            self._take(endpoints)
        except BaseException:
            os.close(self._fd)
            raise

    def release(self) -> None:
        """Removes the sockets, which must be closed by now, and lets the next daemon in."""
        for path in self._sockets:
            path.unlink(missing_ok=True)
        os.close(self._fd)

    def _take(self, endpoints: Endpoints) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(self._fd, 32, 0).decode(errors="replace").strip() or "unknown"
            raise PageddError(
                "already_running",
                f"another pagedd (pid {pid}) serves {endpoints.directory}; stop it, or choose another --runtime-dir",
                field="runtime_dir",
            ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
        for path in self._sockets:
            remove_stale_socket(path)


def remove_stale_socket(path: Path) -> None:
    """Removes a socket that nobody answers on. Raises `PageddError("already_running")` for one that is alive.

    Raises `PageddError("invalid_setting")` when the path is anything but a socket.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise PageddError(
            "invalid_setting",
            f"{path} is in the way and is not a socket; remove it, or choose another --runtime-dir",
            field="runtime_dir",
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
        # A listener with a full backlog would make a blocking connect wait, and is alive anyway.
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            with suppress(FileNotFoundError):
                path.unlink()
            return
        except BlockingIOError:
            pass
    raise PageddError(
        "already_running",
        f"something serves {path} already; stop it, or choose another --runtime-dir",
        field="runtime_dir",
    )


@contextmanager
def socket_mode(mode: int) -> Iterator[None]:
    """Sockets bound inside get exactly `mode` from the moment they exist; a chmod afterwards would leave a gap.

    The umask is the whole process's, so bind and leave: no await inside.
    """
    previous = os.umask(0o777 & ~mode)
    try:
        yield
    finally:
        os.umask(previous)
