"""When a file was last used, written as its time of change: the order that the next start goes by."""

import os
import threading
import time
from contextlib import suppress
from pathlib import Path


class UseStamps:
    """Each stamp is after all before it, also where the clock was set back meanwhile. Any thread may stamp.

    Attributes:
        newest_ns: the latest time of all files; who finds files says what theirs is.
    """

    def __init__(self) -> None:
        self.newest_ns = 0
        self._lock = threading.Lock()

    def stamp(self, path: Path) -> None:
        """The file was used now. Waits for the disk, and for nobody else who does."""
        with self._lock:
            # A file's time is Unix time, which people see; only `newest_ns` makes an order of it.
            self.newest_ns = used_ns = max(self.newest_ns + 1, time.time_ns())  # noqa: TID251 (no other time fits)
        with suppress(OSError):
            os.utime(path, ns=(used_ns, used_ns))
