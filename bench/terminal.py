"""A program in a pseudo-terminal of its own. What it is told and what it writes is the caller's."""

import os
import pty
import struct
import subprocess
import termios
from collections.abc import Mapping, Sequence
from fcntl import ioctl


def start_in_terminal(
    command: Sequence[str], rows: int, columns: int, environ: Mapping[str, str] | None = None
) -> tuple["subprocess.Popen[bytes]", int]:
    """The process, in a session of its own, and our end of its terminal, which the caller closes.

    `environ` is added to this process's own.
    """
    terminal, its_end = pty.openpty()
    ioctl(its_end, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))
    process = subprocess.Popen(
        command,
        stdin=its_end,
        stdout=its_end,
        stderr=its_end,
        start_new_session=True,
        env=os.environ | {"TERM": "xterm-256color"} | dict(environ or {}),
    )
    os.close(its_end)
    return process, terminal
