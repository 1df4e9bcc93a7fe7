"""One file of KV blocks: how it is written, and everything that must hold before a byte of it is believed.

    header       magic, version, block size, bytes a block, number of blocks, identity, digest of header and table
    table        for each block: key, key of the block before it, digest of key and bytes, digest in the pool's index,
                 its position, token ids
    bytes        of one block after another

Numbers are little-endian. The identity is a digest over model, form of the cache and layout; whoever differs in any
finds a foreign file. A file appears under its name complete and on the disk, or not at all. Doesn't know which files
there are, nor which are worth keeping: see `disk_tier.py`.
"""

import os
import re
import secrets
import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from pagedd.engine.kv.stored_block import INDEX_DIGEST_BYTES, KEY_BYTES, BlockBytes, StoredBlock

VERSION = 2
SUFFIX = ".kv"
UNFINISHED_SUFFIX = ".unfinished"
IDENTITY_BYTES = 32

_MAGIC = b"pageddKV"
_DIGEST_BYTES = 32
_NAME_BYTES = 8
# Nothing that stands under a file's name may hold the engine up or lead elsewhere.
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_ENTRY = struct.Struct(f"<{KEY_BYTES}s{KEY_BYTES}s{_DIGEST_BYTES}s{INDEX_DIGEST_BYTES}sI")
_HEADER = struct.Struct(f"<8sIIQI{IDENTITY_BYTES}s{_DIGEST_BYTES}s")


class UnusableSegment(Exception):
    """Why a file is ignored, in words. `is_foreign`: it is whole, but another model's or form's."""

    def __init__(self, reason: str, *, is_foreign: bool = False) -> None:
        super().__init__(reason)
        self.is_foreign = is_foreign


@dataclass(frozen=True, slots=True)
class SegmentForm:
    """What a file must have in common with the running engine. `identity` is of `IDENTITY_BYTES`."""

    identity: bytes
    block_size: int
    block_bytes: int

    @property
    def entry_bytes(self) -> int:
        """Of one block in the table."""
        return _ENTRY.size + 4 * self.block_size

    @property
    def bytes_per_block(self) -> int:
        """That a block adds to a file."""
        return self.entry_bytes + self.block_bytes

    def file_bytes(self, num_blocks: int) -> int:
        return self.data_offset(num_blocks) + num_blocks * self.block_bytes

    def data_offset(self, num_blocks: int) -> int:
        return _HEADER.size + num_blocks * self.entry_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A file whose header and table are right. Its blocks' bytes are checked when they are read."""

    path: Path
    form: SegmentForm
    blocks: tuple[StoredBlock, ...]
    digests: tuple[bytes, ...]
    num_bytes: int

    def read(self, index: int) -> bytearray:
        """Raises `UnusableSegment` when the bytes are not those that were written, `OSError` when there are none."""
        size = self.form.block_bytes
        data = bytearray(size)
        with open(os.open(self.path, _READ_FLAGS), "rb", buffering=0) as file:
            file.seek(self.form.data_offset(len(self.blocks)) + index * size)
            num_read = file.readinto(data)
        if num_read != size or _block_digest(self.blocks[index].key, data) != self.digests[index]:
            raise UnusableSegment(f"block {index} is not what was written")
        return data


class Place(NamedTuple):
    """Where a block is: a file, and which of its blocks."""

    segment: Segment
    position: int

    @property
    def key(self) -> bytes:
        return self.segment.blocks[self.position].key


def is_segment_name(name: str, suffix: str) -> bool:
    """Whether `write_segment` gives such names."""
    return re.fullmatch(rf"[0-9a-f]{{{2 * _NAME_BYTES}}}{re.escape(suffix)}", name) is not None


def write_segment(directory: Path, form: SegmentForm, blocks: Sequence[tuple[StoredBlock, BlockBytes]]) -> Segment:
    """A new file with these blocks, durable when this returns. Raises `OSError`; then nothing is left behind."""
    path = directory / f"{secrets.token_hex(_NAME_BYTES)}{SUFFIX}"
    unfinished = path.with_suffix(UNFINISHED_SUFFIX)
    digests = tuple(_block_digest(block.key, data) for block, data in blocks)
    contents = tuple(block for block, _ in blocks)
    table = b"".join(_entry(block, digest) for block, digest in zip(contents, digests, strict=True))
    try:
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            _write(file.fileno(), _header(form, len(blocks), table) + table)
            for _, data in blocks:
                _write(file.fileno(), data)
            os.fsync(file.fileno())
        unfinished.rename(path)
        _sync_directory(directory)
    except OSError:
        unfinished.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise
    return Segment(path, form, contents, digests, form.file_bytes(len(blocks)))


def read_segment(path: Path, form: SegmentForm) -> Segment:
    """Header and table of a file. Raises `UnusableSegment`, or `OSError` when it cannot be read."""
    with open(os.open(path, _READ_FLAGS), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise UnusableSegment("it is no regular file")
        head = file.read(_HEADER.size)
        if len(head) < _HEADER.size or not head.startswith(_MAGIC):
            raise UnusableSegment("it is no file of KV blocks, or cut off")
        _, version, block_size, block_bytes, num_blocks, identity, _ = _HEADER.unpack(head)
        if version != VERSION:
            raise UnusableSegment(f"its format is version {version}, this is {VERSION}")
        if (identity, block_size, block_bytes) != (form.identity, form.block_size, form.block_bytes):
            raise UnusableSegment("it is of another model, dtype, block size or layout", is_foreign=True)
        if status.st_size != form.file_bytes(num_blocks):
            raise UnusableSegment(f"it has {status.st_size} bytes of {form.file_bytes(num_blocks)}")
        table = file.read(num_blocks * form.entry_bytes)
    if _header(form, num_blocks, table) != head:
        raise UnusableSegment("its table is not what was written")
    entries = [table[start : start + form.entry_bytes] for start in range(0, len(table), form.entry_bytes)]
    blocks = tuple(_stored_block(entry) for entry in entries)
    digests = tuple(_ENTRY.unpack_from(entry)[2] for entry in entries)
    return Segment(path, form, blocks, digests, status.st_size)


def _header(form: SegmentForm, num_blocks: int, table: bytes) -> bytes:
    def packed(digest: bytes) -> bytes:
        return _HEADER.pack(_MAGIC, VERSION, form.block_size, form.block_bytes, num_blocks, form.identity, digest)

    return packed(blake2b(packed(bytes(_DIGEST_BYTES)) + table, digest_size=_DIGEST_BYTES).digest())


def _entry(block: StoredBlock, digest: bytes) -> bytes:
    head = _ENTRY.pack(block.key, block.parent_key, digest, block.digest, block.position)
    return head + struct.pack(f"<{len(block.token_ids)}I", *block.token_ids)


def _stored_block(entry: bytes) -> StoredBlock:
    key, parent_key, _, digest, position = _ENTRY.unpack_from(entry)
    token_bytes = entry[_ENTRY.size :]
    token_ids = struct.unpack(f"<{len(token_bytes) // 4}I", token_bytes)
    return StoredBlock(key, parent_key, token_ids, digest, position)


def _block_digest(key: bytes, data: BlockBytes) -> bytes:
    """Binds the bytes to what they are said to be."""
    hasher = blake2b(key, digest_size=_DIGEST_BYTES)
    hasher.update(data)
    return hasher.digest()


def _write(descriptor: int, data: bytes | BlockBytes) -> None:
    """All of it: a write to a disk that is nearly full may end early."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
