"""The terminal: what is written to it, and how it is put back as it was.

Owns that nobody waits for a terminal that is gone, and that it can be put back while a writer waits for it. Knows no
picture and no key.
"""

import os
import termios
import time
from contextlib import suppress
from select import select

# Everything that `textual.drivers.linux_driver` turns on, turned off.
_PLAIN = (
    "\x1b[?2026l\x1b[?2004l\x1b[?7h\x1b[?2048l"  # synchronized output, bracketed paste, no line wrap, sizes in band
    "\x1b[?1000l\x1b[?1003l\x1b[?1015l\x1b[?1006l\x1b[?1016l"  # mouse
    "\x1b[<u\x1b[?1049l\x1b[?25h\x1b[?1004l"  # kitty's keys, alternate screen, no cursor, focus
)


_PATIENCE_S = 0.5
_TRY_AGAIN_S = 0.01


class Terminal:
    """A file to write to, as far as Textual's writer thread needs one.

    Args:
        fileno: of the terminal.
        encoding: what it cannot say is written as a question mark.
    """

    def __init__(self, fileno: int, encoding: str) -> None:
        self._fileno = fileno
        self._encoding = encoding
        self._before: list[int | list[bytes | int]] | None = None
        with suppress(termios.error):
            self._before = termios.tcgetattr(fileno)
        self._waiting: list[str] = []
        self._is_left = False

    def fileno(self) -> int:
        return self._fileno

    def write(self, text: str) -> None:
        self._waiting.append(text)

    def flush(self) -> None:
        """Returns when the terminal has taken everything, or is gone."""
        data = memoryview("".join(self._waiting).encode(self._encoding, "replace"))
        self._waiting.clear()
        while data and not self._is_left:
            try:
                data = data[os.write(self._fileno, data) :]
            except BlockingIOError:  # another program that has it too made it so
                select([], [self._fileno], [])
            except OSError:
                self._is_left = True

    def put_back(self) -> None:
        """As it was before anything was written, from any thread. Nothing is written to it any more."""
        self._is_left = True
        # An opening of our own: "never wait" would otherwise hold for everybody who has this terminal.
        with suppress(OSError):
            opened = os.open(os.ttyname(self._fileno), os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
            try:
                _write_soon(opened, _PLAIN.encode())
            finally:
                os.close(opened)
        if self._before is not None:
            with suppress(termios.error):
                termios.tcsetattr(self._fileno, termios.TCSANOW, self._before)


def _write_soon(fileno: int, data: bytes) -> None:
    """What a terminal takes that is read, once a writer that is under way has had its turn."""
    limit_s = time.monotonic() + _PATIENCE_S
    while data and time.monotonic() < limit_s:
        try:
            data = data[os.write(fileno, data) :]
        except BlockingIOError:
            time.sleep(_TRY_AGAIN_S)
