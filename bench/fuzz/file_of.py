"""Bytes as a file, for readers that want a path."""

import os
from functools import cache
from pathlib import Path


@cache
def _file(name: str) -> tuple[int, Path]:
    """One for each name and for ever; in memory, so that millions are fast."""
    descriptor = os.memfd_create(name, 0)
    return descriptor, Path(f"/proc/self/fd/{descriptor}")


def file_of(data: bytes, name: str) -> Path:
    """A file that holds `data` until the next call with that name."""
    descriptor, path = _file(name)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, data, 0)
    return path
