"""KV blocks on the disk, so that prefixes outlive the engine: an index in memory, files that are read on a hit.

Owns one directory, which one process uses at a time, and keeps it within its size: whole files go, least recently used
first, whichever model they are of. What is torn, foreign or of a later version is ignored with a line in the log; files
with other kinds of names are none of its business. Whoever could write there could put foreign numbers under known
keys, so the directory must be this user's alone. When the disk is full, nothing more is written until there is room,
and what is there is served. `disk_segment.py` has the files, `disk_reader.py` reads them, `disk_thread.py` is who
waits for the disk, and `disk_writer.py` decides what is written and when. No torch.
"""

import fcntl
import logging
import os
import stat
import threading
import time
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from pagedd.engine.kv.disk_reader import DiskRead, DiskReader
from pagedd.engine.kv.disk_segment import (
    SUFFIX,
    UNFINISHED_SUFFIX,
    Place,
    Segment,
    SegmentForm,
    UnusableSegment,
    is_segment_name,
    read_segment,
    write_segment,
)
from pagedd.engine.kv.disk_thread import DiskThread
from pagedd.engine.kv.stored_block import BlockBytes, StoredBlock
from pagedd.engine.kv.use_stamps import UseStamps
from pagedd.engine.stats import TierStats

log = logging.getLogger(__name__)

# Of blocks on their way to sequences. What is wanted beyond that is computed: so much memory is taken at most.
MAX_READING_BYTES = 256 << 20
# Whoever lets go of the directory waits so long for stamps and removals that are due.
MAX_FINISH_S = 1.0


class Forgotten(NamedTuple):
    """What became of blocks that were to go: `num_left` are in files that are not removed yet. They are not served, but
    if the files cannot be removed the next start finds them, and `DiskTier.blocks` has them for whoever tries once
    more. `num_beside` others are lost, since they lay in the same files.
    """

    num_left: int
    num_beside: int


class DirectoryInUse(Exception):
    """Another process has the directory."""


class _Removal:
    """Of one file, by the disk's thread. `error`: why it stays, once `is_over`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.error: OSError | None = None
        self.is_over = False

    def run(self) -> None:
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            self.error = error
        self.is_over = True


class DiskTier:
    """The files of one directory, at most `max_bytes` of them.

    Raises `DirectoryInUse`, or `OSError` when the directory cannot be made or read.

    Attributes:
        num_reading_blocks: that were asked for, and not taken yet.
    """

    def __init__(self, directory: Path, max_bytes: int, form: SegmentForm, *, thread: DiskThread | None = None) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        refuse_unless_private(directory)
        self._lock = _lock(directory)
        self.figures = TierStats(max_bytes=max_bytes)
        self.form = form
        self._directory = directory
        self._thread = thread or DiskThread()
        self._uses = UseStamps()
        self._reader = DiskReader(self._thread, self._uses)
        self._removals: dict[Path, _Removal] = {}  # that were asked for, and not taken in yet
        self.num_reading_blocks = 0
        self._places: dict[bytes, Place] = {}
        self._older_places: dict[bytes, list[Place]] = {}  # of blocks that were written once more, oldest first
        self._segments: dict[Path, Segment] = {}  # those of this engine's form
        self._file_bytes: dict[Path, int] = {}  # least recently used first; those that are ignored as well
        self._num_bytes = 0  # of all of them
        self._is_writable = True
        try:
            for left_behind, _ in self._own_files(UNFINISHED_SUFFIX):
                left_behind.unlink()
            self._read_index()
        except OSError:
            self.close()
            raise
        try:
            self._make_room(0)
        except OSError as error:
            log.warning("KV blocks on the disk: more than %d bytes stay: %s", max_bytes, error)

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    def holds(self, block: StoredBlock) -> bool:
        """Exactly this content, token by token."""
        found = self._places.get(block.key)
        return found is not None and found.segment.blocks[found.position].token_ids == block.token_ids

    @property
    def is_stuck(self) -> bool:
        """The disk has not answered for long: nothing should be written, or wanted."""
        return self._thread.is_stuck

    @property
    def max_reads(self) -> int:
        """How many more blocks may be asked for now; none while the disk does not answer."""
        if self.is_stuck:
            return 0
        return max(1, MAX_READING_BYTES // self.form.block_bytes) - self.num_reading_blocks

    def start_read(self, keys: Sequence[bytes]) -> DiskRead:
        """Has these blocks read; `take_read` follows."""
        self.num_reading_blocks += len(keys)
        return self._reader.start([self._places[key] for key in keys])

    def await_reads(self, limit_s: float) -> None:
        """Until one is over, `limit_s` at most."""
        self._reader.wait(limit_s)

    def take_read(self, read: DiskRead) -> list[BlockBytes]:
        """The bytes of the first blocks, as they were written; what has not come yet is given up.

        Blocks that were forgotten since are not among them, nor those behind one. One that could not be read is
        forgotten.
        """
        is_over, failure = read.is_over, read.failure
        data = read.data[:]
        read.is_given_up = True
        self.num_reading_blocks -= len(read.places)
        self.figures.read_seconds_total += sum(read.block_seconds[: len(data)])
        self.figures.read_bytes_total += sum(map(len, data))
        if is_over and failure is not None and (place := read.places[len(data)]).key in self:
            log.warning("KV blocks on the disk: %s: %s; the block is computed", place.segment.path.name, failure)
            self._drop(place.key, place.segment)
        num_forgotten = next((i for i, place in enumerate(read.places[: len(data)]) if place.key not in self), None)
        return data[:num_forgotten]

    def file_of(self, key: bytes) -> Segment | None:
        """Where the block of that key is."""
        found = self._places.get(key)
        return None if found is None else found.segment

    def note_use(self, keys: Sequence[bytes]) -> list[Path]:
        """The files of these blocks were used now; that of the first stays longest. They are returned, oldest first.

        Asks nothing of the disk: the next start knows of it only by what `start_read` reads, and `touch`.
        """
        files = dict.fromkeys(self._places[key].segment.path for key in keys if key in self._places)
        for path in reversed(files):
            self._file_bytes[path] = self._file_bytes.pop(path)
        return list(reversed(files))

    def touch(self, keys: Sequence[bytes]) -> None:
        """As `note_use`, and the next start knows of it once the disk's thread has said so."""
        with suppress(OSError):  # without a thread it knows less, which costs at most a recent block
            self._thread.ask([partial(self._uses.stamp, path) for path in self.note_use(keys)])

    def write(self, blocks: Sequence[tuple[StoredBlock, BlockBytes]]) -> bool:
        """Writes a file of them, in place of the least recently used. False when the disk would not take it.

        Waits for the disk: not to be called while it `is_stuck`.
        """
        num_bytes = self.form.file_bytes(len(blocks))
        started = time.perf_counter()
        try:
            if not self._make_room(num_bytes):
                raise OSError(f"no room for {num_bytes} bytes within {self.figures.max_bytes}")
            segment = write_segment(self._directory, self.form, blocks)
        except OSError as error:
            if self._is_writable:
                log.warning("KV blocks cannot be written to %s: %s; what is there is served", self._directory, error)
            self._is_writable = False
            return False
        self._is_writable = True
        self._uses.stamp(segment.path)
        self._enter(segment)
        self.figures.stored_total += len(blocks)
        self.figures.written_bytes_total += num_bytes
        self.figures.write_seconds_total += time.perf_counter() - started
        return True

    def blocks(self) -> Iterator[StoredBlock]:
        """All that lie in files, those as well that could not be read."""
        for segment in self._segments.values():
            yield from segment.blocks

    def forget(self, keys: Set[bytes], limit_s: float = 0.0) -> Forgotten:
        """Serves these blocks no more, and has the whole files that they are in removed; waits `limit_s` for that."""
        doomed: dict[Path, Segment] = {}
        for path, segment in self._segments.items():
            if in_file := [block.key for block in segment.blocks if block.key in keys]:
                doomed[path] = segment
                for key in in_file:
                    self._drop(key, segment)
        if doomed:
            self._remove_later(doomed, limit_s)
        left: set[bytes] = set()
        beside: set[bytes] = set()
        for path, segment in doomed.items():
            of_file = {block.key for block in segment.blocks}
            if path in self._segments:
                left |= of_file & keys
            else:
                beside |= of_file - keys
        return Forgotten(len(left), sum(key not in self._places for key in beside))

    def clear(self) -> None:
        """Removes every file of this engine's form."""
        self.forget({block.key for block in self.blocks()})

    def stats(self) -> TierStats:
        self._take_removals()
        return replace(self.figures, num_blocks=len(self._places), num_bytes=self._num_bytes)

    def finish(self) -> None:
        """Until stamps and removals that are due are on the disk, for a moment at most."""
        self._thread.finish(MAX_FINISH_S)
        self._take_removals()

    def close(self) -> None:
        """Lets another process have the directory, once `finish` is back."""
        self.finish()
        os.close(self._lock)

    def _read_index(self) -> None:
        num_foreign = 0
        for path, status in sorted(self._own_files(SUFFIX), key=lambda item: item[1].st_mtime_ns):
            self._uses.newest_ns = status.st_mtime_ns
            self._count(path, status.st_size)
            try:
                self._enter(read_segment(path, self.form))
            except UnusableSegment as error:
                num_foreign += error.is_foreign
                if not error.is_foreign:
                    log.warning("KV blocks on the disk: %s is ignored: %s", path.name, error)
            except OSError as error:
                log.warning("KV blocks on the disk: %s is ignored: %s", path.name, error)
        if num_foreign:
            files = "file of KV blocks is" if num_foreign == 1 else "files of KV blocks are"
            log.info("%d %s of another model, dtype, block size or layout", num_foreign, files)
        log.info("%s has %d KV blocks of this model", self._directory, len(self._places))

    def _own_files(self, suffix: str) -> Iterator[tuple[Path, os.stat_result]]:
        """Regular files with names that `write_segment` gives."""
        for entry in list(os.scandir(self._directory)):
            if not is_segment_name(entry.name, suffix):
                continue
            if entry.is_file(follow_symlinks=False):
                yield Path(entry), entry.stat(follow_symlinks=False)
            else:
                log.warning("KV blocks on the disk: %s is ignored: it is no regular file", entry.name)

    def _enter(self, segment: Segment) -> None:
        self._count(segment.path, segment.num_bytes)
        self._segments[segment.path] = segment
        for index, block in enumerate(segment.blocks):
            if (older := self._places.get(block.key)) is not None:
                self._older_places.setdefault(block.key, []).append(older)
            self._places[block.key] = Place(segment, index)

    def _count(self, path: Path, num_bytes: int) -> None:
        self._num_bytes += num_bytes - self._file_bytes.pop(path, 0)
        self._file_bytes[path] = num_bytes

    def _make_room(self, num_bytes: int) -> bool:
        """False when there is not so much. Raises `OSError` at the first file that cannot be removed."""
        self._take_removals()
        for path in list(self._file_bytes):
            if self._num_bytes + num_bytes <= self.figures.max_bytes:
                break
            num_blocks = len(self._places)
            self._remove(path)
            self.figures.evictions_total += num_blocks - len(self._places)
        return self._num_bytes + num_bytes <= self.figures.max_bytes

    def _remove(self, path: Path) -> None:
        """Raises `OSError`; then the file still takes its room, and its blocks are served."""
        path.unlink(missing_ok=True)
        self._leave(path)

    def _remove_later(self, paths: Iterable[Path], limit_s: float) -> None:
        """By the disk's thread, before it reads on; waits for it, `limit_s` at most."""
        removals, are_over = [_Removal(path) for path in paths], threading.Event()
        self._removals |= {removal.path: removal for removal in removals}
        try:
            self._thread.ask([*(removal.run for removal in removals), are_over.set], is_urgent=True)
        except OSError as error:
            for removal in removals:
                removal.error, removal.is_over = error, True
        else:
            if limit_s and not are_over.wait(0.0 if self.is_stuck else limit_s):
                log.warning(
                    "KV blocks on the disk: files to remove are still there after %g s: %d", limit_s, len(removals)
                )
        self._take_removals()

    def _take_removals(self) -> None:
        """Takes in what became of those that were asked for."""
        for removal in [removal for removal in self._removals.values() if removal.is_over]:
            del self._removals[removal.path]
            if removal.error is None:
                self._leave(removal.path)
            else:
                log.warning("KV blocks on the disk: %s cannot be removed: %s", removal.path.name, removal.error)

    def _leave(self, path: Path) -> None:
        """The file is gone."""
        self._num_bytes -= self._file_bytes.pop(path, 0)
        if (segment := self._segments.pop(path, None)) is not None:
            for block in segment.blocks:
                self._drop(block.key, segment)

    def _drop(self, key: bytes, segment: Segment) -> None:
        """Of this block the copy in `segment` is of no use any more; there may be an older one."""
        copies = [*self._older_places.pop(key, ()), *([place] if (place := self._places.pop(key, None)) else ())]
        copies = [place for place in copies if place.segment is not segment]
        if copies:
            self._places[key] = copies.pop()
        if copies:
            self._older_places[key] = copies


def refuse_unless_private(directory: Path) -> None:
    status = directory.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        owner, mode = status.st_uid, stat.S_IMODE(status.st_mode)
        raise PermissionError(f"{directory} has owner {owner} and mode {mode:o}; make it this user's, with mode 700")


def _lock(directory: Path) -> int:
    """Held until the descriptor is closed or the process ends, however it ends."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(directory / "lock", flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise DirectoryInUse(f"another process uses {directory}") from None
    return descriptor
