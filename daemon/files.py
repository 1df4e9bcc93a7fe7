"""Files that are complete and right or absent, whatever interrupts the writer; and a lock between processes.

Owns no path of its own. An `OSError` of writing becomes a `PageddError` that says what to do about it.
"""

import errno
import fcntl
import glob
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pagedd.client.errors import PageddError


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Held by one process at a time; waits for it. The kernel lets go of it when its holder dies."""
    with explained_write(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def scratch_directory(beside: Path) -> Iterator[Path]:
    """An empty folder on the file system of `beside`, removed at the end with what is still in it.

    Only for who holds the lock of `beside`: what a holder that was killed has left is removed first.
    """
    with explained_write(beside):
        beside.parent.mkdir(parents=True, exist_ok=True)
        for left in beside.parent.glob(f".{glob.escape(beside.name)}.scratch-*"):
            shutil.rmtree(left, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{beside.name}.scratch-", dir=beside.parent))
    try:
        with explained_write(beside):
            yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def read_regular(path: Path, max_bytes: int) -> tuple[bytes, os.stat_result]:
    """What a small file holds, and what the kernel says of it. Waits for nobody and reads without end from nothing.

    Raises `OSError`, also for a pipe or device under its name and for a file of over `max_bytes`.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is no regular file")
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(f"it has over {max_bytes} bytes")
    return content, status


def put_in_place(finished: Path, target: Path) -> None:
    """Makes the file or folder `finished` durable under the name `target`, in place of what is there."""
    for path in [*finished.rglob("*"), finished]:
        _sync(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)  # a folder cannot be renamed over one that holds files
    finished.rename(target)
    _sync(target.parent)


def verify_sha256(path: Path, expected: str) -> None:
    """Removes the file and raises `checksum_mismatch` unless its digest is `expected`."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        path.unlink()
        message = f"{path.name} has sha256 {found}, expected {expected}; it was removed, fetch it again"
        raise PageddError("checksum_mismatch", message)


def reason(error: Exception) -> str:
    """Why a file cannot be had, without Python's number and path, which whoever names the file says better."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


@contextmanager
def explained_write(target: Path) -> Iterator[None]:
    """Turns an `OSError` into `model_unavailable` with the next step."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            why = "the disk is full; free some space, or set XDG_CACHE_HOME to another disk"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            why = f"{error.strerror}; make the folder writable, or set XDG_CACHE_HOME to another one"
        else:
            why = f"{reason(error)}; check the disk"
        raise PageddError("model_unavailable", f"cannot write {target}: {why}") from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
