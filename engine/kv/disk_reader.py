"""Reads KV blocks from the disk in a thread of its own, so that no step ever waits for a disk.

Owns that thread and the order of what it has to read. The thread opens files and adds to a `DiskRead`, nothing else:
what came, and what it means for `disk_tier.py`, the engine's own thread takes when it is there. The thread ends when
there is nothing left to read. It is none of a pool's: those are joined when the process ends, and a disk that hangs
would hold that up.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from pagedd.engine.kv.disk_segment import Place
from pagedd.engine.kv.stored_block import BlockBytes
from pagedd.engine.kv.use_stamps import UseStamps

# One block takes milliseconds on a slow disk. Nobody should begin to wait for one that takes longer than this.
STUCK_S = 0.5


class DiskRead:
    """Blocks that are wanted together, in order. It ends at the first that cannot be read.

    Attributes:
        began_s: when it was asked for, of `time.monotonic`.
        data: what has been read so far. Only the reader's thread adds to it, and sets what follows.
        seconds: that reading took, without the time in which others were read.
        failure: why the block after `data` could not be read.
        is_over: nothing will be added any more.
        is_given_up: nobody wants what is still to come.
    """

    def __init__(self, places: Sequence[Place], uses: UseStamps) -> None:
        self.places = places
        self.uses = uses
        self.began_s = time.monotonic()
        self.data: list[BlockBytes] = []
        self.seconds = 0.0
        self.failure: Exception | None = None
        self.is_over = False
        self.is_given_up = False

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self.began_s


def _start_thread(target: Callable[[], None]) -> None:
    threading.Thread(target=target, name="kv-disk-reader", daemon=True).start()


class DiskReader:
    """One thread while there is something to read, whoever wants it. `start_thread` has a thread call what it gets."""

    def __init__(self, start_thread: Callable[[Callable[[], None]], None] = _start_thread) -> None:
        self._start_thread = start_thread
        self._lock = threading.Lock()
        self._queue: deque[DiskRead] = deque()
        self._has_thread = False
        self._block_began_s: float | None = None  # of the block that the thread reads now
        self._some_are_over = threading.Event()

    def start(self, places: Sequence[Place], uses: UseStamps) -> DiskRead:
        """After all that was asked for before. The files of what was read are stamped."""
        read = DiskRead(places, uses)
        with self._lock:
            self._queue.append(read)
            starts_thread, self._has_thread = not self._has_thread, True
        if starts_thread:
            self._start_thread(self._read_all)
        return read

    def wait(self, limit_s: float) -> None:
        """Until a read is over, one that ended since the last call as well."""
        self._some_are_over.wait(limit_s)
        self._some_are_over.clear()

    @property
    def is_stuck(self) -> bool:
        """The disk has not answered for long."""
        began_s = self._block_began_s
        return began_s is not None and time.monotonic() - began_s > STUCK_S

    def _read_all(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._has_thread = False
                    return
                read = self._queue.popleft()
            self._read(read)
            read.is_over = True
            self._some_are_over.set()
            _stamp_files(read)

    def _read(self, read: DiskRead) -> None:
        for segment, index in read.places:
            if read.is_given_up:
                return
            self._block_began_s = began_s = time.monotonic()
            try:
                read.data.append(segment.read(index))
            except Exception as error:  # whatever it is costs this block, not the thread
                read.failure = error
                return
            finally:
                self._block_began_s = None
                read.seconds += time.monotonic() - began_s


def _stamp_files(read: DiskRead) -> None:
    """So that the next start knows which files were used last; the first block's stays longest."""
    for path in reversed(dict.fromkeys(place.segment.path for place in read.places[: len(read.data)])):
        read.uses.stamp(path)
