"""The terminal as Textual's driver, without its thread that looks for keys ten times a second.

Beside a model that wants every core each such look is taken from the model, on cold caches, for nothing: here the event
loop reads keys as they come. Owns when what happens between `keyboard.py`, `terminal.py`, `end_signals.py` and the app.
"""

import os
import signal
import sys
from asyncio import Handle
from collections import deque
from collections.abc import Iterable
from io import TextIOWrapper
from typing import Any, cast

from textual.constants import ESCAPE_DELAY
from textual.drivers.linux_driver import LinuxDriver
from textual.events import Key
from textual.message import Message

from pagedd.tui.end_signals import EndSignals
from pagedd.tui.keyboard import LEAVE, Keyboard
from pagedd.tui.terminal import Terminal

_READ_BYTES = 4096
_ALONE_S = ESCAPE_DELAY + 0.01
# A paste over a slow line may pause for that long.
_PASTE_S = 3.0
# Of more than a person can type in a moment the app gets so many at a time, so that leaving need not wait for the rest.
_AT_ONCE = 32


class TerminalDriver(LinuxDriver):
    """Does nothing while nobody types."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # Not standard error, as Textual has it: that may be a file.
        output = sys.__stdout__
        assert output is not None, "`app.why_no_screen` has looked"
        self._terminal = Terminal(output.fileno(), output.encoding)
        self._file = cast(TextIOWrapper, self._terminal)
        self._keyboard = Keyboard()
        self._pending: deque[Message] = deque()
        self._listening: Handle | None = None
        self._silence: Handle | None = None
        self._is_suspended = False
        # In the loop, and not, as Textual has it, in the middle of whatever runs: that may be a write.
        self._loop.add_signal_handler(signal.SIGTSTP, self._suspend)
        self._loop.add_signal_handler(signal.SIGCONT, self._continue)
        EndSignals(self._leave_soon, self._terminal.put_back).start()

    def run_input_thread(self) -> None:
        """Hands the terminal to the loop; the thread that Textual made for it ends here."""
        self._listening = self._loop.call_soon_threadsafe(self._loop.add_reader, self.fileno, self._read)

    def disable_input(self) -> None:
        super().disable_input()  # waits for the thread
        for handle in (self._listening, self._silence):
            if handle is not None:
                handle.cancel()
        self._loop.remove_reader(self.fileno)

    def _leave_soon(self) -> None:
        self._loop.call_soon_threadsafe(self._leave, signal.SIGTERM)

    def _leave(self, number: int) -> None:
        self._app.exit(return_code=128 + number)

    def _suspend(self) -> None:
        self.suspend_application_mode()
        self._is_suspended = True
        os.kill(os.getpid(), signal.SIGSTOP)

    def _continue(self) -> None:
        """Of a SIGSTOP nobody is told: what the shell did to the terminal since is undone before it is taken anew."""
        if not self._is_suspended:
            self.suspend_application_mode()
        self._is_suspended = False
        self._must_signal_resume = True  # to the app, which has to draw everything again
        self.resume_application_mode()

    def _read(self) -> None:
        try:
            typed = os.read(self.fileno, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            typed = b""
        if not typed:  # the terminal is gone
            self._loop.remove_reader(self.fileno)
            self._leave(signal.SIGHUP)
            return
        self._take(self._keyboard.feed(typed))
        if self._silence is not None:
            self._silence.cancel()
        self._silence = self._loop.call_later(_ALONE_S, self._rest)

    def _rest(self) -> None:
        self._take(self._keyboard.rest())
        self._silence = self._loop.call_later(_PASTE_S, lambda: self._take(self._keyboard.end_paste()))

    def _take(self, messages: Iterable[Message]) -> None:
        is_handing_over = bool(self._pending)
        for message in messages:
            if isinstance(message, Key) and message.key == LEAVE:
                self._pending.clear()
            self._pending.append(message)
        if not is_handing_over:
            self._hand_over()

    def _hand_over(self) -> None:
        for _ in range(min(_AT_ONCE, len(self._pending))):
            self.process_message(self._pending.popleft())
        if self._pending:
            self._app.call_later(self._hand_over)
