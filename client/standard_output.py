"""Whoever reads what a program prints may leave before its end, as `head` does: then the program ends, quietly."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_BROKEN_PIPE = 141


@contextmanager
def until_nobody_reads() -> Iterator[None]:
    """Exits, with the status that a shell's program has then, when the reader of standard output has left."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes standard output once more at exit, which would complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(EXIT_BROKEN_PIPE) from None
