"""Asks the disk in a thread of its own, so that no step ever waits for one.

Owns that thread and the order of what the disk is asked for: what is read, removed and stamped. Knows none of these;
what came of it, the engine's own thread takes when it is there. The thread ends when there is nothing left to ask. It
is none of a pool's: those are joined when the process ends, and a disk that hangs would hold that up. Only writing is
the engine's own, in idle times (`disk_writer.py`), and not while the disk is stuck.
"""

import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

log = logging.getLogger(__name__)

# One block takes milliseconds on a slow disk, and so long where it has to wake up. Nobody should begin to wait for a
# disk that has been asked for longer than this.
STUCK_S = 0.5


def _start_thread(target: Callable[[], None]) -> None:
    threading.Thread(target=target, name="kv-disk", daemon=True).start()


class DiskThread:
    """One thread while there is something to ask, whoever wants it. `start_thread` has a thread call what it gets."""

    def __init__(self, start_thread: Callable[[Callable[[], None]], None] = _start_thread) -> None:
        self._start_thread = start_thread
        self._jobs: deque[Callable[[], None]] = deque()
        self._has_thread = False
        self._ended = threading.Condition()  # also the lock of the two above
        self._asked_s: float | None = None  # since when the disk has not answered

    def ask(self, jobs: Iterable[Callable[[], None]], *, is_urgent: bool = False) -> None:
        """Has the thread do `jobs`, in order; each asks the disk for one thing, so that `is_stuck` tells when it hangs.

        `is_urgent`: before all that waits, else after it. Raises `OSError` when there can be no thread; nothing is done
        then, and the next call tries again.
        """
        jobs = list(jobs)
        with self._ended:
            if is_urgent:
                self._jobs.extendleft(reversed(jobs))
            else:
                self._jobs.extend(jobs)
            if self._has_thread or not jobs:
                return
            self._has_thread = True
        try:
            self._start_thread(self._do_all)
        except (RuntimeError, MemoryError) as error:
            with self._ended:
                self._jobs.clear()
                self._has_thread = False
            raise OSError(errno.EAGAIN, f"no thread to ask the disk: {error}") from error

    @property
    def is_stuck(self) -> bool:
        """The disk has not answered for long."""
        asked_s = self._asked_s
        return asked_s is not None and time.monotonic() - asked_s > STUCK_S

    def finish(self, limit_s: float) -> None:
        """Until all is done or the disk is stuck, `limit_s` at most."""
        end_s = time.monotonic() + limit_s
        with self._ended:
            while self._has_thread and not self.is_stuck and (left_s := end_s - time.monotonic()) > 0:
                self._ended.wait(min(STUCK_S, left_s))

    def _do_all(self) -> None:
        while True:
            with self._ended:
                if not self._jobs:
                    self._has_thread = False
                    self._ended.notify_all()
                    return
                job = self._jobs.popleft()
            self._asked_s = time.monotonic()
            try:
                job()
            except Exception:  # whatever it is costs this job, not the thread
                log.exception("the disk could not be asked")
            finally:
                self._asked_s = None
