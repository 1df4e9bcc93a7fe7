"""From the bytes of a terminal to messages: keys, mouse, pastes, sizes.

Owns that nothing that comes ends the hearing: Textual's parser is done for after a sequence that it cannot read, or
after half a character. Knows no terminal, no clock and nothing of what keys do.
"""

from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator

from textual._xterm_parser import BRACKETED_PASTE_END, XTermParser
from textual.events import Key
from textual.message import Message

LEAVE = "ctrl+c"
# As a byte, and as terminals send it that tell keys apart (kitty's protocol). No terminal pastes either.
_LEAVE_BYTES = (b"\x03", b"\x1b[99;5u")


class Keyboard:
    """Fed with what is read, in pieces of any size."""

    def __init__(self) -> None:
        self._parser = XTermParser()
        # What no key sends must not end the program.
        self._decode = getincrementaldecoder("utf-8")("replace").decode

    def feed(self, typed: bytes) -> Iterator[Message]:
        if any(leave in typed for leave in _LEAVE_BYTES):
            # Whatever it comes after, a paste that never ended included.
            self._begin_anew()
            yield Key(LEAVE, "\x03")
        # Half a character is no text yet. To the parser, no text is the end of all input.
        elif text := self._decode(typed):
            yield from self._survived(self._parser.feed(text))

    def rest(self) -> Iterator[Message]:
        """Nothing more came for a moment: an escape was the key, and not the beginning of another one's sequence."""
        return self._survived(self._parser.tick())

    def end_paste(self) -> Iterator[Message]:
        """Nothing more came for long: a paste is over, although its end was lost. Without one it changes nothing."""
        return self._survived(self._parser.feed(BRACKETED_PASTE_END))

    def _survived(self, messages: Iterable[Message]) -> Iterator[Message]:
        """The messages up to a fault of the parser, which costs the rest of what was read."""
        try:
            yield from messages
        except Exception:
            self._begin_anew()

    def _begin_anew(self) -> None:
        before, self._parser = self._parser, XTermParser()
        # What the terminal said of itself, which it will not say again: how to read positions of the mouse.
        self._parser.mouse_pixels = before.mouse_pixels
        self._parser.terminal_size = before.terminal_size
        self._parser.terminal_pixel_size = before.terminal_pixel_size
