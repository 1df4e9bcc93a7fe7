"""Which fetched models are served: a shared lock on the folder of the weights, for as long as a daemon serves them.

The kernel lets go of it when its holder dies. A folder that cannot be opened is held by nobody, and served none the
less.
"""

import contextlib
import fcntl
import os
from pathlib import Path


class ModelUse:
    """Held from its making to `close`, by as many as want to."""

    def __init__(self, weights: Path) -> None:
        """`weights` is a file, or a folder of them."""
        self._fileno: int | None = None
        with contextlib.suppress(OSError):
            self._fileno = os.open(weights if weights.is_dir() else weights.parent, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self._fileno, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def close(self) -> None:
        """Safe to call twice."""
        if self._fileno is not None:
            os.close(self._fileno)
            self._fileno = None


def is_used(folder: Path) -> bool:
    """Whether anybody serves weights in it or in a folder below it. Raises `OSError`."""
    return any(_is_locked(each) for each in (folder, *(path for path in folder.rglob("*") if path.is_dir())))


def _is_locked(folder: Path) -> bool:
    fileno = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fileno, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fileno)
    return False
