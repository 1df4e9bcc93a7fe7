"""Where every thread of a process is, when it dies of a fault or is asked while it hangs.

Written by a C signal handler (`faulthandler`), so it also works while Python itself does not get its turn. To a file,
when somebody is to read it afterwards: the engine's front puts it into the log and the crash report.
"""

import faulthandler
import os
import signal
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

# The front sends it to an engine that hangs, before it ends it.
TRACE_SIGNAL = signal.SIGUSR1

_MAX_BYTES = 64 << 10


def arm(path: Path | None = None) -> Callable[[BaseException], None]:
    """For the rest of this process's life. What is returned writes an exception to `path` as well."""
    if path is None:
        faulthandler.enable()
        return lambda error: None
    file = _create(path)
    faulthandler.enable(file)
    faulthandler.register(TRACE_SIGNAL, file, all_threads=True)
    return lambda error: traceback.print_exception(error, file=file)


def take(path: Path) -> str:
    """What was written; the file is removed. Empty when there is nothing."""
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES).decode(errors="replace").strip()
    except OSError:
        return ""
    path.unlink(missing_ok=True)
    return text


def _create(path: Path) -> TextIO:
    with suppress(FileNotFoundError):
        path.unlink()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    return open(descriptor, "w", buffering=1, encoding="utf-8")
