"""Sockets that systemd holds for the daemon, so that a client that comes first starts it: sd_listen_fds(3).

Owns which of them there are. Those that nobody holds are bound as usual, with modes of the daemon's own; those of
systemd have the modes of `pagedd.socket`.
"""

import logging
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from pagedd.client.errors import PageddError
from pagedd.daemon.runtime_dir import socket_mode

# Path of a listening Unix socket -> its descriptor.
Inherited = Mapping[Path, int]

_FIRST_FD = 3

log = logging.getLogger(__name__)


def inherited_sockets(environ: Mapping[str, str] = os.environ) -> dict[Path, int]:
    """The listening Unix sockets that this process was started with. Other descriptors are passed over, with a warning.

    Raises:
        PageddError: `invalid_setting` for a count that is none.
    """
    if environ.get("LISTEN_PID") != str(os.getpid()):
        return {}
    count = environ.get("LISTEN_FDS", "0")
    if not (count.isascii() and count.isdigit() and len(count) < 5):
        raise PageddError("invalid_setting", f"LISTEN_FDS={count[:20]!r}: the number of sockets, as systemd sets it")
    found = {}
    for fd in range(_FIRST_FD, _FIRST_FD + int(count)):
        try:
            os.set_inheritable(fd, False)
            # A connection that is gone before it is accepted must not hold its acceptor up.
            os.set_blocking(fd, False)
            listener = socket.socket(fileno=fd)
        except OSError as error:
            log.warning("descriptor %d, which came with the start, is no socket: %s", fd, error)
            continue
        name = listener.getsockname() if listener.family == socket.AF_UNIX else None
        if listener.type == socket.SOCK_STREAM and isinstance(name, str) and name:  # bytes: an abstract one
            found[Path(name)] = fd
        else:
            log.warning("descriptor %d, which came with the start, is no listening Unix socket with a path", fd)
        listener.detach()
    return found


def listen(path: Path, mode: int, inherited: Inherited) -> socket.socket:
    """A Unix socket bound to `path` with file mode `mode`, or the one that is held for it. Raises `OSError`."""
    if (fd := inherited.get(path)) is not None:
        return socket.socket(fileno=fd)  # closed with it; systemd keeps its own
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        with socket_mode(mode):
            listener.bind(str(path))
    except OSError:
        listener.close()
        raise
    return listener
