"""Where every thread of a process is, written to the log when it dies of a fault or is asked while it hangs.

Written by a C signal handler (`faulthandler`), so it also works while Python itself does not get its turn.
"""

import faulthandler
import signal

# The front sends it to an engine that hangs, before it ends it.
TRACE_SIGNAL = signal.SIGUSR1


def arm() -> None:
    """For the rest of this process's life."""
    faulthandler.enable()
    faulthandler.register(TRACE_SIGNAL, all_threads=True)
