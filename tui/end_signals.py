"""Signals that end the program, heard by a thread: the main one may be waiting for a terminal that nobody reads.

Owns how long the program may take to leave by itself. Knows the terminal only as something to put back.
"""

import time
from collections.abc import Callable
from signal import (
    SIG_BLOCK,
    SIG_IGN,
    SIG_UNBLOCK,
    SIGHUP,
    SIGQUIT,
    SIGTERM,
    SIGTTOU,
    getsignal,
    pthread_sigmask,
    raise_signal,
    sigwait,
)
from threading import Thread

_PATIENCE_S = 2.0


class EndSignals(Thread):
    """To be made in the main thread, before others that should not be ended by these signals instead.

    SIGTERM asks the program to leave, and ends it if it does not. SIGHUP and SIGQUIT end it at once.

    Args:
        leave: asks; called from this thread.
        put_back: called before the program is ended.
    """

    def __init__(self, leave: Callable[[], None], put_back: Callable[[], None]) -> None:
        super().__init__(name="end-signals", daemon=True)
        self._leave = leave
        self._put_back = put_back
        # What whoever started us wants to be ignored (nohup) is.
        self._awaited = {number for number in (SIGTERM, SIGHUP, SIGQUIT) if getsignal(number) != SIG_IGN}
        pthread_sigmask(SIG_BLOCK, self._awaited)

    def run(self) -> None:
        number = sigwait(self._awaited)
        if number == SIGTERM:
            self._leave()
            time.sleep(_PATIENCE_S)
        # Also in the background, where it would stop us.
        pthread_sigmask(SIG_BLOCK, {SIGTTOU})
        self._put_back()
        pthread_sigmask(SIG_UNBLOCK, {number})
        raise_signal(number)
