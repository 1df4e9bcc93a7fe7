"""A ROUTER socket in the event loop: who sent what, who is gone, and who does not read.

Owns peers, their backlog and the noticing of their end. Knows nothing of what is said: `zmq_api.py` does.
libzmq tells of a lost connection by a monitor event without a name, so peers are then probed: with ROUTER_MANDATORY a
message to one that is gone raises EHOSTUNREACH.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from pagedd.client.protocol import MAX_MESSAGE_BYTES, PROTOCOL_VERSION, Pong, encode
from pagedd.daemon import activation
from pagedd.daemon.caller import Caller, caller_of_address
from pagedd.daemon.zmq_connections import ConnectionMonitor

log = logging.getLogger(__name__)

# What libzmq holds for a peer that reads slowly; beyond it the backlog here begins.
_SEND_HIGH_WATER = 1000
# What libzmq reads ahead of a peer, in messages of up to `MAX_MESSAGE_BYTES`; beyond it the peer has to wait.
_RECEIVE_HIGH_WATER = 16
MAX_BACKLOG_BYTES = 4 << 20
_RETRY_S = 0.02
# A pipe is taken down some time after the monitor event, so one probe would often be too early.
_PROBE_DELAYS_S = (0.0, 0.02, 0.1, 0.5)
# Other work of the event loop gets its turn after so many messages.
_MAX_MESSAGES_A_TURN = 64
_PROBE = encode(Pong(id=""))


@dataclass(slots=True, eq=False)
class Peer:
    """One connection that has something to wait for. Forgotten as soon as it has not.

    Attributes:
        caller: who the kernel says it is; None when the transport does not tell.
        live: client-given id -> daemon-given request_id. Mutated only by `zmq_api.ZmqApi`.
        backlog: messages that libzmq would not take, oldest first.
        is_gone: nothing can be sent any more.
    """

    identity: bytes
    caller: Caller | None
    live: dict[str, str] = field(default_factory=dict)
    backlog: deque[bytes] = field(default_factory=deque)
    backlog_bytes: int = 0
    is_gone: bool = False


class RouterSocket:
    """`connections` are those to it. Callbacks run in the event loop and may send:

    `on_message(peer, parts)`: `parts` are the frames after the identity.
    `on_gone(peer)`: it disconnected with something in `live` or in its backlog.
    `on_too_slow(peer)`: its backlog is full; what is sent to it before it reads is dropped, unless it is `urgent`.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        path: Path,
        mode: int,
        inherited: activation.Inherited,
        *,
        on_message: Callable[[Peer, list[bytes]], None],
        on_gone: Callable[[Peer], None],
        on_too_slow: Callable[[Peer], None],
    ) -> None:
        """Binds `path` with file mode `mode`. Raises `zmq.ZMQError` when it is taken."""
        self._on_message = on_message
        self._on_gone = on_gone
        self._on_too_slow = on_too_slow
        self._peers: dict[bytes, Peer] = {}
        self._loop = asyncio.get_running_loop()
        self._turn: asyncio.Handle | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._no_backlog = asyncio.Event()
        self._probes: list[asyncio.TimerHandle] = []
        self._is_closed = False

        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDHWM, _SEND_HIGH_WATER)
        self._socket.setsockopt(zmq.RCVHWM, _RECEIVE_HIGH_WATER)
        # libzmq drops the connection of whoever sends more.
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self.connections = ConnectionMonitor(self._socket, path)
        activation.bind(self._socket, path, mode, inherited)
        self._loop.add_reader(self._socket.fileno(), self._on_readable)
        self._loop.add_reader(self.connections.fileno(), self._on_monitor)
        # A descriptor tells of what comes after the last look, so there must be a first one.
        self._ask_for_turn()
        self._on_monitor()

    def send(self, peer: Peer, payload: bytes, *, urgent: bool = False) -> None:
        """Sends now, or later when the peer reads too slowly. Never waits, never raises."""
        if peer.is_gone or self._is_closed:
            return
        if not peer.backlog and self._try_send(peer, payload):
            return
        if peer.is_gone or (peer.backlog_bytes > MAX_BACKLOG_BYTES and not urgent):
            return
        was_full = peer.backlog_bytes > MAX_BACKLOG_BYTES
        peer.backlog.append(payload)
        peer.backlog_bytes += len(payload)
        self._peers[peer.identity] = peer
        if self._retry is None:
            self._no_backlog.clear()
            self._retry = self._loop.call_later(_RETRY_S, self._send_backlogs)
        if not was_full and peer.backlog_bytes > MAX_BACKLOG_BYTES:
            # Not here: the sender may be in the middle of telling several things.
            self._loop.call_soon(self._on_too_slow, peer)

    def settle(self, peer: Peer) -> None:
        """To be called after `peer.live` changed: a peer is remembered exactly as long as it waits for something."""
        if not peer.is_gone and (peer.live or peer.backlog):
            self._peers[peer.identity] = peer
        elif self._peers.get(peer.identity) is peer:
            del self._peers[peer.identity]

    async def close(self, linger_s: float) -> None:
        """Lets what was sent leave for up to `linger_s`, then closes."""
        deadline_s = self._loop.time() + linger_s
        if self._retry is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(linger_s):
                    await self._no_backlog.wait()
        self._is_closed = True
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_reader(self.connections.fileno())
        for handle in (self._turn, self._retry, *self._probes):
            if handle is not None:
                handle.cancel()
        self.connections.close()
        left_s = max(0.0, deadline_s - self._loop.time())
        self._socket.close(linger=int(left_s * 1000))

    # Receiving

    def _on_readable(self) -> None:
        # The descriptor tells of changes only, so everything must be taken, or another turn asked for.
        self._turn = None
        for _ in range(_MAX_MESSAGES_A_TURN):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            except zmq.ZMQError:
                log.exception("a message could not be received")
                return
            self._receive(frames)
        self._ask_for_turn()

    def _receive(self, frames: "list[zmq.Frame]") -> None:
        identity = frames[0].bytes
        caller = _caller_of(frames[-1])
        peer = self._peers.get(identity)
        if peer is not None and peer.caller != caller:
            # Another connection took the identity of one that is gone.
            self._gone(peer)
            peer = None
        peer = peer or Peer(identity, caller)
        try:
            self._on_message(peer, [frame.bytes for frame in frames[1:]])
        except Exception:
            log.exception("a message of %s broke", caller)

    def _ask_for_turn(self) -> None:
        if self._turn is None and not self._is_closed:
            self._turn = self._loop.call_soon(self._on_readable)

    # Sending

    def _try_send(self, peer: Peer, payload: bytes) -> bool:
        """False when libzmq's queue for the peer is full, or the peer is gone."""
        try:
            self._socket.send_multipart([peer.identity, PROTOCOL_VERSION, payload], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                log.error("a message to %s could not be sent: %s", peer.caller, error)
            peer.is_gone = True
            self._loop.call_soon(self._gone, peer)
            return False
        finally:
            # Sending may have taken the notice of an arrival with it.
            self._ask_for_turn()
        return True

    def _send_backlogs(self) -> None:
        self._retry = None
        for peer in [peer for peer in self._peers.values() if peer.backlog]:
            while peer.backlog and self._try_send(peer, peer.backlog[0]):
                peer.backlog_bytes -= len(peer.backlog.popleft())
            self.settle(peer)
        if any(peer.backlog for peer in self._peers.values()):
            self._retry = self._loop.call_later(_RETRY_S, self._send_backlogs)
        else:
            self._no_backlog.set()

    # Noticing the end of a peer

    def _on_monitor(self) -> None:
        if self.connections.read():
            for handle in self._probes:
                handle.cancel()
            self._probes = [self._loop.call_later(delay_s, self._probe) for delay_s in _PROBE_DELAYS_S]

    def _probe(self) -> None:
        for peer in list(self._peers.values()):
            self._try_send(peer, _PROBE)

    def _gone(self, peer: Peer) -> None:
        peer.is_gone = True
        peer.backlog.clear()
        peer.backlog_bytes = 0
        if self._peers.get(peer.identity) is peer:
            del self._peers[peer.identity]
        self._on_gone(peer)


def _caller_of(frame: "zmq.Frame") -> Caller | None:
    try:
        return caller_of_address(str(frame.get("Peer-Address")))
    except zmq.ZMQError:  # the transport has no such property
        return None
