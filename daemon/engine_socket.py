"""The front's end of the socket to one engine process, driven by the event loop without a task or a thread.

Owns the ZeroMQ side only; `engine_link.py` has the messages, `engine_child.py` acts on them.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import zmq

from pagedd.client.endpoints import ipc
from pagedd.daemon.engine_link import FromEngine, ToEngine, decode_from_engine, encode
from pagedd.daemon.runtime_dir import ADMIN_MODE, socket_mode

log = logging.getLogger(__name__)


class EngineSocket:
    """Bound for one engine process and closed with it, so that nothing of a dead engine reaches the next."""

    def __init__(self, path: Path, on_message: Callable[[FromEngine], None]) -> None:
        """Binds at once. Raises `OSError`."""
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._path = path
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        # No limit, so that sending never waits: admission bounds how many requests there are.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        try:
            with socket_mode(ADMIN_MODE):
                self._socket.bind(ipc(path))
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise OSError(error.errno, error.strerror, str(path)) from error
        self._fd = self._socket.fileno()
        self._loop.add_reader(self._fd, self._read)

    def send(self, message: ToEngine) -> None:
        """Never waits. A message to an engine that is gone is dropped: its exit status is about to say so."""
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            log.debug("no engine to hear %s", type(message).__name__)
        # Sending may swallow the wake-up that arriving messages gave the descriptor: ZeroMQ signals edges, not levels.
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self._read)

    def close(self) -> None:
        """Removes the socket; what is unsent is dropped."""
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._context.destroy(linger=0)
            # ZeroMQ leaves the file behind.
            self._path.unlink(missing_ok=True)

    def _read(self) -> None:
        while not self._socket.closed:
            try:
                payload = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._on_message(decode_from_engine(payload))
            except Exception:
                # The rest must still be read: there is no second wake-up for it.
                log.exception("fault while acting on a message from the engine")
