"""Reads KV blocks from the disk, a run of them for each who wants some.

Owns what a read has brought so far. The disk's thread (`disk_thread.py`) opens files and adds to a `DiskRead`, nothing
else; what that means for `disk_tier.py`, the engine's own thread decides.
"""

import logging
import threading
import time
from collections.abc import Sequence
from functools import partial

from pagedd.engine.kv.disk_segment import Place
from pagedd.engine.kv.disk_thread import DiskThread
from pagedd.engine.kv.stored_block import BlockBytes
from pagedd.engine.kv.use_stamps import UseStamps

log = logging.getLogger(__name__)


class DiskRead:
    """Blocks that are wanted together, in order. It ends at the first that cannot be read.

    Only the disk's thread sets what follows `wanted_s`, but for `is_given_up`.

    Attributes:
        places: where the blocks are.
        wanted_s: when it was asked for, of `time.monotonic`.
        begun_s: when the disk was asked for the first block, None before.
        data: what has been read so far.
        block_seconds: that each of them took.
        failure: why the block after `data` could not be read.
        is_over: nothing will be added any more.
        is_given_up: nobody wants what is still to come.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        self.places = places
        self.wanted_s = time.monotonic()
        self.begun_s: float | None = None
        self.data: list[BlockBytes] = []
        self.block_seconds: list[float] = []
        self.failure: Exception | None = None
        self.is_over = False
        self.is_given_up = False

    @property
    def waited_s(self) -> float:
        """Since it was asked for."""
        return time.monotonic() - self.wanted_s

    def read_next(self, place: Place) -> None:
        """The block after `data`, which is at `place`; nothing once one could not be read, or nobody wants it."""
        if self.is_given_up or self.failure is not None:
            return
        asked_s = time.monotonic()
        self.begun_s = self.begun_s or asked_s
        try:
            block = place.segment.read(place.position)
        except Exception as error:  # whatever it is costs this block
            self.failure = error
        else:
            self.block_seconds.append(time.monotonic() - asked_s)  # first: whoever finds a block finds its time
            self.data.append(block)


class DiskReader:
    """What `thread` reads, one read after another. The files of what came are stamped with `uses`."""

    def __init__(self, thread: DiskThread, uses: UseStamps) -> None:
        self._thread = thread
        self._uses = uses
        self._some_are_over = threading.Event()

    def start(self, places: Sequence[Place]) -> DiskRead:
        """After all that was asked for before. A read that cannot begin is over, and brings nothing."""
        read = DiskRead(places)
        try:
            self._thread.ask([*(partial(read.read_next, place) for place in places), partial(self._end, read)])
        except OSError as error:
            log.warning("KV blocks on the disk: %s; %d blocks are computed", error.strerror, len(places))
            read.is_over = True
        return read

    def wait(self, limit_s: float) -> None:
        """Until a read is over, one that ended since the last call as well."""
        self._some_are_over.wait(limit_s)
        self._some_are_over.clear()

    def _end(self, read: DiskRead) -> None:
        read.is_over = True
        self._some_are_over.set()
        # The first block's stays longest.
        paths = reversed(dict.fromkeys(place.segment.path for place in read.places[: len(read.data)]))
        self._thread.ask([partial(self._uses.stamp, path) for path in paths])
