"""Accepts connections on a TCP socket and shakes hands with them, before they are anybody's.

Owns how long a handshake may take, and how many there may be at once: whoever begins one has shown no key yet.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import suppress

from pagedd.daemon.tls_certificate import TlsCertificate

log = logging.getLogger(__name__)

MAX_HANDSHAKES = 128
# After an accept that failed, as without a descriptor left.
_PAUSE_S = 1.0


class TlsServer:
    """Made in an event loop; accepts at once.

    Args:
        connect: makes the protocol of a connection that has shaken hands.
    """

    def __init__(
        self,
        listener: socket.socket,
        connect: Callable[[], asyncio.Protocol],
        certificate: TlsCertificate,
        handshake_timeout_s: float,
        backlog: int,
    ) -> None:
        listener.setblocking(False)
        listener.listen(backlog)
        self._listener = listener
        self._connect = connect
        self._certificate = certificate
        self._handshake_timeout_s = handshake_timeout_s
        self._handshakes: dict[socket.socket, asyncio.Task[None]] = {}  # the oldest first
        self._accepting = asyncio.create_task(self._accept(), name="accepting over TLS")

    async def close(self) -> None:
        """Connections that have shaken hands go on."""
        tasks = [self._accepting, *self._handshakes.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                log.warning("no connection could be accepted over TLS: %s", error)
                await asyncio.sleep(_PAUSE_S)
                continue
            if len(self._handshakes) >= MAX_HANDSHAKES:
                oldest = next(iter(self._handshakes))
                self._handshakes.pop(oldest).cancel()
            self._handshakes[connection] = asyncio.create_task(self._shake_hands(connection))

    async def _shake_hands(self, connection: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._connect,
                connection,
                ssl=self._certificate.context,
                ssl_handshake_timeout=self._handshake_timeout_s,
            )
        except (OSError, asyncio.CancelledError) as error:
            # Not every loop closes what it could not finish.
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            log.debug("a TLS handshake failed: %r", error)
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            self._handshakes.pop(connection, None)
