"""Keys and mouse from the terminal, read by the event loop as they come.

Textual's own driver has a thread that looks ten times a second. Beside a model that wants every core each look is taken
from the model, on cold caches, for nothing.
"""

from asyncio import Handle
from codecs import getincrementaldecoder
from collections.abc import Iterable
from contextlib import suppress
from os import read
from typing import Any

from textual._xterm_parser import XTermParser
from textual.constants import ESCAPE_DELAY
from textual.drivers.linux_driver import LinuxDriver
from textual.message import Message

_READ_BYTES = 4096
# After an escape nothing more came: it was the key and not the beginning of another one's sequence.
_ALONE_S = ESCAPE_DELAY + 0.01


class TerminalDriver(LinuxDriver):
    """Does nothing while nobody types."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._parser = XTermParser(self._debug)
        # What no key sends must not end the program.
        self._decode = getincrementaldecoder("utf-8")("replace").decode
        self._listening: Handle | None = None
        self._escaping: Handle | None = None

    def run_input_thread(self) -> None:
        """Hands the terminal to the loop; the thread that Textual made for it ends here."""
        self._listening = self._loop.call_soon_threadsafe(self._loop.add_reader, self.fileno, self._read)

    def disable_input(self) -> None:
        super().disable_input()  # waits for the thread
        for handle in (self._listening, self._escaping):
            if handle is not None:
                handle.cancel()
        self._loop.remove_reader(self.fileno)

    def _read(self) -> None:
        typed = b""
        with suppress(OSError):  # as when the terminal is gone
            typed = read(self.fileno, _READ_BYTES)
        if not typed:
            self._loop.remove_reader(self.fileno)
            return
        self._process(self._parser.feed(self._decode(typed)))
        if self._escaping is not None:
            self._escaping.cancel()
        self._escaping = self._loop.call_later(_ALONE_S, lambda: self._process(self._parser.tick()))

    def _process(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self.process_message(message)
