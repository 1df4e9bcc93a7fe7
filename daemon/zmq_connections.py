"""How many connections a ZeroMQ socket may have: libzmq has no bound, and aborts when no descriptor is left.

Owns the count, which the socket's monitor tells, and the end of what is beyond the bound. Who sends what is
`zmq_router.py`'s, how much memory they may fill `zmq_memory.py`'s; the bound of HTTP is in `http_connection.py`.
"""

import fcntl
import logging
import os
import socket
import struct
import termios
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from pagedd.daemon.caller import Caller, caller_of_socket
from pagedd.daemon.http_connection import max_connections

log = logging.getLogger(__name__)

_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED


def max_zmq_connections() -> int:
    """Of one socket. All three together leave an eighth of the descriptors to everything that is no connection."""
    return max_connections() // 4


class ConnectionMonitor:
    """Watches one bound ZeroMQ socket. `fileno` is readable when there is something to `read`."""

    def __init__(self, zmq_socket: "zmq.Socket[bytes]", path: Path) -> None:
        """To be made before the socket is bound to `path`."""
        self._socket = zmq_socket
        self._monitor: Any = zmq_socket.get_monitor_socket(_EVENTS)
        self._path = path
        self._open: set[int] = set()
        self._limit = max_zmq_connections()

    def fileno(self) -> int:
        fd: int = self._monitor.fileno()
        return fd

    def read(self) -> bool:
        """Reads what there is, and ends connections beyond the bound. True when one was lost."""
        was_lost = False
        accepted: list[int] = []
        # All of it first: a descriptor that has been closed meanwhile may be somebody else's by now.
        with suppress(zmq.Again):
            while True:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
                if event["event"] == zmq.EVENT_ACCEPTED:
                    self._open.add(event["value"])
                    accepted.append(event["value"])
                else:
                    self._open.discard(event["value"])
                    was_lost = True
        num_beyond = len(self._open) - self._limit
        if num_beyond > 0:
            beyond = [fd for fd in accepted if fd in self._open][-num_beyond:]
            log.warning(
                "%d connections to %s, limit %d; %d are closed", len(self._open), self._path, self._limit, len(beyond)
            )
            for fd in beyond:
                self._end(fd)
        return was_lost

    def sending(self) -> set[int]:
        """The connections, by descriptor, whose bytes wait at this moment to be read."""
        return {fd for fd in self._open if _num_unread_bytes(fd)}

    def end(self, among: Collection[int]) -> list[Caller]:
        """Ends those that are open still; tells whose they were."""
        ended = (self._end(fd) for fd in self._open.intersection(among))
        return [caller for caller in ended if caller is not None]

    def end_all(self) -> list[Caller]:
        """Ends every connection; tells whose they were."""
        return self.end(self._open)

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)

    def _end(self, fd: int) -> Caller | None:
        """libzmq reads the end of the connection, and closes its descriptor itself. None when it has ended already."""
        try:
            connection = socket.socket(fileno=os.dup(fd))
        except OSError:
            return None
        with connection, suppress(OSError):
            if connection.getsockname() == str(self._path):
                connection.shutdown(socket.SHUT_RDWR)
                return caller_of_socket(connection)
        return None


def _num_unread_bytes(fd: int) -> int:
    try:
        num_bytes: int = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))[0]
    except OSError:  # it has ended by itself
        return 0
    return num_bytes
