"""Tells systemd how the service is doing: sd_notify(3) and sd_watchdog_enabled(3) in a few lines, without libsystemd.

Outside systemd (no `NOTIFY_SOCKET`) every call does nothing.
"""

import os
import socket
from collections.abc import Mapping


def notify(*assignments: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Sends assignments like `READY=1` as one datagram. True when there was a manager to hear them.

    A manager that is gone is no reason to stop serving: errors of the socket are answered with False.
    """
    address = environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    # "@" stands for the zero byte that puts a name into Linux's abstract namespace.
    name = "\0" + address[1:] if address.startswith("@") else address
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        try:
            channel.connect(name)
            channel.sendall("\n".join(assignments).encode())
        except OSError:
            return False
    return True


def watchdog_interval_s(environ: Mapping[str, str] = os.environ) -> float | None:
    """How often `WATCHDOG=1` is to be said: thrice in the time that systemd waits for it. None: nobody waits."""
    try:
        usec, pid = int(environ["WATCHDOG_USEC"]), int(environ.get("WATCHDOG_PID", os.getpid()))
    except (KeyError, ValueError):
        return None
    return usec / 3e6 if usec > 0 and pid == os.getpid() else None
