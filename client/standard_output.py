"""Whoever reads what a program prints may leave before its end, as `head` does: then the program ends, quietly.

A file that takes no more, on a full disk, ends it with a sentence.
"""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

EXIT_BROKEN_PIPE = 141
# Of a `print`; whatever else a program writes to refuses with a `PageddError` that names it.
_TAKES_NO_MORE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


@contextmanager
def until_nobody_reads() -> Iterator[None]:
    """Exits, with the status that a shell's program has then, when the reader of standard output has left.

    And with `os.EX_IOERR` where standard output takes no more.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _leave(EXIT_BROKEN_PIPE)
    except OSError as error:
        if error.errno not in _TAKES_NO_MORE or error.filename is not None:
            raise
        print(f"standard output cannot be written: {error.strerror}; give it a place with room", file=sys.stderr)
        _leave(os.EX_IOERR)


def _leave(status: int) -> NoReturn:
    # Python flushes standard output once more at exit, which would complain again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(status) from None
