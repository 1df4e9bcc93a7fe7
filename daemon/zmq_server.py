"""The peers of one ZeroMQ socket: who is connected, what each has sent, and what it has not read yet.

Owns connections and their bounds: how many, how long a handshake, how much each may leave unread, and how much all may
have kept for them. A peer is its connection, and its user is who the kernel says: what it calls itself is never looked
at. The bytes are `zmtp.py`'s, the meaning of messages `zmq_api.py`'s and `stats_feed.py`'s.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import cast

from pagedd.daemon import zmtp
from pagedd.daemon.activation import Inherited, listen
from pagedd.daemon.caller import Caller, caller_of_socket
from pagedd.daemon.http_connection import max_connections
from pagedd.daemon.zmtp import Message, Ping, Ready, SocketKind, Subscription, ZmtpError

log = logging.getLogger(__name__)

HANDSHAKE_S = 10.0
# What a peer may leave unread beside the message that is being written; more is dropped, unless it is urgent.
MAX_BACKLOG_BYTES = 4 << 20
# Of all peers: messages that have not come whole, and answers that nobody reads.
MAX_HELD_BYTES = 256 << 20
# Small answers to one peer leave together, up to so many bytes.
_HIGH_WATER_BYTES = 16 << 10
# Other work of the event loop gets its turn after so many frames of one peer.
_MAX_EVENTS_A_TURN = 128
_LISTEN_BACKLOG = 512


def max_zmq_connections() -> int:
    """Of one socket. All three together leave an eighth of the descriptors to everything that is no connection."""
    return max_connections() // 4


class Handler:
    """What a server's peers do. Called in the event loop, may send and must not wait. A fault in it costs a message."""

    def on_message(self, peer: "Peer", frames: list[bytes]) -> None:
        """One whole message."""

    def on_subscription(self, peer: "Peer", subscription: Subscription) -> None:
        """From a SUB or XSUB."""

    def on_too_slow(self, peer: "Peer") -> None:
        """Its backlog is full: what it is sent from now on is dropped, unless it is urgent, until it reads."""

    def on_gone(self, peer: "Peer") -> None:
        """Its handshake was over, and its connection is."""


class HeldBytes:
    """How much is kept for peers, of all servers that share this. Beyond the limit, the user with most loses most."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._total = 0
        self._of: dict[Peer, int] = {}

    def note(self, peer: "Peer", num_bytes: int) -> None:
        """So many are kept for `peer` now. May end a peer, this one or another."""
        self._total += num_bytes - self._of.pop(peer, 0)
        if num_bytes:
            self._of[peer] = num_bytes
        while self._total > self._limit:
            self._relieve()

    def _relieve(self) -> None:
        by_user: Counter[int | None] = Counter()
        for peer, num_bytes in self._of.items():
            by_user[peer.caller.uid] += num_bytes
        [(uid, _)] = by_user.most_common(1)
        largest = max((peer for peer in self._of if peer.caller.uid == uid), key=self._of.__getitem__)
        self._total -= self._of.pop(largest)
        log.warning("ZeroMQ peers have over %d bytes kept; one of %s is closed", self._limit, largest.caller.name)
        largest.end()


class Server:
    """Listens at one path, and has the peers that connect to it."""

    def __init__(self, kind: SocketKind, path: Path, handler: Handler, held: HeldBytes) -> None:
        self.kind = kind
        self.handler = handler
        self.held = held
        self._path = path
        self._limit = max_zmq_connections()
        self._listener: asyncio.Server | None = None
        self._is_inherited = self._is_closed = False
        # By user, each in the order in which they came.
        self._peers: dict[int | None, dict[Peer, None]] = {}
        self._num_peers = 0
        self._all_gone = asyncio.Event()

    async def start(self, mode: int, inherited: Inherited) -> None:
        """Listens at the path, with file mode `mode` unless the socket is `inherited`. Raises `OSError`."""
        self._is_inherited = self._path in inherited
        listener = listen(self._path, mode, inherited)
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(lambda: Peer(self), sock=listener, backlog=_LISTEN_BACKLOG)

    async def close(self, linger_s: float) -> None:
        """Takes nothing more, and lets what was sent leave for up to `linger_s`."""
        self._is_closed = True
        if self._listener is not None:
            self._listener.close()
            if not self._is_inherited:
                self._path.unlink(missing_ok=True)
        for peer in list(self._all()):
            peer.finish()
        with suppress(TimeoutError):
            async with asyncio.timeout(linger_s):
                await self._wait_gone()
        for peer in list(self._all()):
            peer.end()
        await self._wait_gone()

    def enter(self, peer: "Peer") -> None:
        """Takes a newcomer in. Beyond the bound, the user who has most connections loses the newest of them."""
        if self._is_closed:  # it was accepted just before
            peer.end()
            return
        self._peers.setdefault(peer.caller.uid, {})[peer] = None
        self._num_peers += 1
        if self._num_peers > self._limit:
            most = max(self._peers.values(), key=lambda of_user: (len(of_user), peer in of_user))
            newest = next(reversed(most))
            log.warning(
                "%d connections to %s, limit %d; one of %s is closed",
                self._num_peers, self._path, self._limit, newest.caller.name,
            )  # fmt: skip
            self.leave(newest)
            newest.end()

    def leave(self, peer: "Peer") -> None:
        """Forgets one that is gone, or about to be."""
        of_user = self._peers.get(peer.caller.uid, {})
        if peer not in of_user:
            return
        del of_user[peer]
        if not of_user:
            del self._peers[peer.caller.uid]
        self._num_peers -= 1
        if not self._num_peers:
            self._all_gone.set()

    def _all(self) -> "Iterable[Peer]":
        return (peer for of_user in self._peers.values() for peer in of_user)

    async def _wait_gone(self) -> None:
        while self._num_peers:
            self._all_gone.clear()
            await self._all_gone.wait()


class Peer(asyncio.Protocol):
    """One connection.

    Attributes:
        caller: who the kernel says it is.
        backlog_bytes: what waits behind that which is being written.
    """

    def __init__(self, server: Server) -> None:
        self.caller = Caller()
        self.backlog_bytes = 0
        self._server = server
        self._decoder = zmtp.Decoder(server.kind)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._handshake: asyncio.TimerHandle | None = None
        self._is_ready = False
        self._is_behind = False  # in reading: more has come than a turn's share
        self._is_writing = False  # the kernel has not taken everything yet
        self._backlog: deque[bytes] = deque()  # behind that

    def send(self, frames: Sequence[bytes], *, is_urgent: bool = False) -> None:
        """Sends now, or later when the peer reads too slowly. Never waits, never raises."""
        was_full = self.backlog_bytes > MAX_BACKLOG_BYTES
        if self._transport.is_closing() or (was_full and not is_urgent):
            return
        self._write(self._decoder.encode(frames))
        if not was_full and self.backlog_bytes > MAX_BACKLOG_BYTES:
            # Not here: the sender may be in the middle of telling several things.
            self._loop.call_soon(self._server.handler.on_too_slow, self)

    def send_newest(self, encoded: bytes) -> None:
        """Sends now, or as soon as what is being written has left, unless there is something newer by then."""
        if not self._transport.is_closing():
            self._backlog.clear()
            self.backlog_bytes = 0
            self._write(encoded)

    def finish(self) -> None:
        """Closes the connection when all that was sent has left."""
        while self._backlog:
            self._transport.write(self._backlog.popleft())
        self._transport.close()

    def end(self) -> None:
        """Closes the connection at once."""
        self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its bases
        try:
            self.caller = caller_of_socket(transport.get_extra_info("socket"))
        except OSError:  # it has gone by itself
            self.end()
            return
        self._transport.set_write_buffer_limits(high=_HIGH_WATER_BYTES)
        self._handshake = self._loop.call_later(HANDSHAKE_S, self._give_up)
        self._transport.write(zmtp.GREETING)
        self._server.enter(self)

    def data_received(self, data: bytes) -> None:
        self._decoder.feed(data)
        self._read()

    def eof_received(self) -> None:
        # Nothing can come any more, and nobody reads: what was not taken would be waited for in vain.
        self.end()

    def pause_writing(self) -> None:
        self._is_writing = True
        self._note_held()

    def resume_writing(self) -> None:
        self._is_writing = False
        while self._backlog and not self._is_writing:
            encoded = self._backlog.popleft()
            self.backlog_bytes -= len(encoded)
            self._transport.write(encoded)
        self._note_held()

    def connection_lost(self, error: Exception | None) -> None:
        if self._handshake is not None:
            self._handshake.cancel()
        self._backlog.clear()
        self._server.held.note(self, 0)
        self._server.leave(self)
        if self._is_ready:
            self._server.handler.on_gone(self)

    # Reading

    def _read(self) -> None:
        """Acts on what has come. A turn's share; the rest in the next turn, and nothing more is read until then."""
        try:
            for _ in range(_MAX_EVENTS_A_TURN):
                if self._transport.is_closing():
                    return
                if (event := self._decoder.next_event()) is None:
                    if self._is_behind:
                        self._is_behind = False
                        self._transport.resume_reading()
                    break
                self._act(event)
            else:
                if not self._is_behind:
                    self._is_behind = True
                    self._transport.pause_reading()
                self._loop.call_soon(self._read)
        except ZmtpError as error:
            self._leave(error)
        else:
            self._note_held()

    def _act(self, event: zmtp.Event) -> None:
        try:
            match event:
                case Message(frames):
                    self._server.handler.on_message(self, frames)
                case Subscription():
                    self._server.handler.on_subscription(self, event)
                case Ping(context):
                    if self.backlog_bytes <= MAX_BACKLOG_BYTES:
                        self._write(zmtp.pong(context))
                case Ready():
                    self._is_ready = True
                    if self._handshake is not None:
                        self._handshake.cancel()
                    self._write(zmtp.ready(self._server.kind))
        except Exception:
            log.exception("a message of %s broke", self.caller.name)

    def _leave(self, error: ZmtpError) -> None:
        log.info("a connection of %s is closed: %s", self.caller.name, error)
        if error.answer:
            # Only hands were shaken so far, so that this is all that has to leave.
            self._transport.write(error.answer)
            self.finish()
        else:
            self.end()

    def _give_up(self) -> None:
        log.info("a connection of %s is closed: no handshake within %g s", self.caller.name, HANDSHAKE_S)
        self.end()

    # Writing

    def _write(self, encoded: bytes) -> None:
        if self._is_writing:
            self._backlog.append(encoded)
            self.backlog_bytes += len(encoded)
            self._note_held()
        else:
            self._transport.write(encoded)

    def _note_held(self) -> None:
        if self._transport.is_closing():
            return
        unwritten = self._transport.get_write_buffer_size() if self._is_writing else 0
        self._server.held.note(self, self._decoder.held_bytes + unwritten + self.backlog_bytes)
