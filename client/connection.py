"""One connection to the daemon: asks over its link, and hands each answer to whoever asked.

Replies carry the asker's `id`, and one task reads them all. Knows no socket (`link.py`) and no place (`endpoints.py`);
`aio.py` says what to ask.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

import msgspec

from pagedd.client import protocol
from pagedd.client.errors import PageddError
from pagedd.client.link import Link
from pagedd.client.protocol import Cancel, Chat, ClientMessage, DaemonMessage, Failed, Generate

_LINGER_MS = 500


class Connection:
    """Asks over one link and hands each answer to the inbox of whoever asked. Owned by `Connections`."""

    def __init__(self, link: Link) -> None:
        self.path = link.path
        self.is_lost = False
        self._link = link
        self._inboxes: dict[str, asyncio.Queue[DaemonMessage | PageddError]] = {}
        self._requests: set[str] = set()  # those of `_inboxes` that can be cancelled
        self._router = asyncio.create_task(self._route(), name=f"pagedd client {link.path.name}")

    def post(self, message: ClientMessage) -> "asyncio.Queue[DaemonMessage | PageddError]":
        """Sends and returns the inbox of the answers. Raises `PageddError("message_too_large")`."""
        inbox: asyncio.Queue[DaemonMessage | PageddError] = asyncio.Queue()
        self.tell(message)
        if self.is_lost:
            inbox.put_nowait(PageddError("daemon_unreachable", f"{self.path}: the daemon closed the connection"))
        self._inboxes[message.id] = inbox
        if isinstance(message, Generate | Chat):
            self._requests.add(message.id)
        return inbox

    def tell(self, message: ClientMessage) -> None:
        """Sends without an interest in the answer."""
        try:
            payload = protocol.encode(message)
        except OverflowError as error:  # a whole number of more than 64 bits, which no field takes
            raise PageddError("invalid_value", f"{error}; see docs/api.md for the range of each field") from None
        if len(payload) > protocol.MAX_MESSAGE_BYTES:
            raise PageddError(
                "message_too_large", f"{len(payload)} bytes, limit {protocol.MAX_MESSAGE_BYTES}; shorten the prompt"
            )
        if not self.is_lost:
            self._link.send(protocol.PROTOCOL_VERSION, payload)

    def forget(self, id: str) -> None:
        """What still comes under this id is dropped."""
        self._inboxes.pop(id, None)
        self._requests.discard(id)

    async def close(self) -> None:
        if not self.is_lost:
            for id in self._requests:
                self.tell(Cancel(id=f"close {id}", target=id))
        self._router.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._router

    async def _route(self) -> None:
        reason = PageddError("daemon_unreachable", f"{self.path}: this client was closed")
        try:
            while True:
                for frames in await self._link.receive():
                    message = _message(frames)
                    if inbox := self._inboxes.get(message.id):
                        inbox.put_nowait(message)
        except PageddError as error:
            reason = error
        finally:
            self.is_lost = True
            self._link.close(linger_ms=_LINGER_MS)
            for inbox in self._inboxes.values():
                inbox.put_nowait(reason)


_Decoded = TypeVar("_Decoded")


def decoded(decode: Callable[[bytes], _Decoded], payload: bytes) -> _Decoded:
    """Raises `PageddError("protocol_version")` for what this client cannot read."""
    try:
        return decode(payload)
    except msgspec.DecodeError as error:
        raise PageddError(
            "protocol_version",
            f"the daemon sent what this client cannot read ({error}); install the same version of both",
        ) from error


def _message(frames: list[bytes]) -> DaemonMessage:
    if len(frames) != 2 or frames[0] != protocol.PROTOCOL_VERSION:
        raise PageddError(
            "protocol_version",
            f"the daemon speaks {frames[0][:16]!r}, this client {protocol.PROTOCOL_VERSION!r}; "
            "install the same version of both",
        )
    return decoded(protocol.decode_daemon, frames[1])


def as_error(answer: DaemonMessage | PageddError) -> PageddError:
    """What an answer that was not hoped for means."""
    match answer:
        case PageddError():
            # A fresh one for each reader: raising one object in several tasks would mix their tracebacks.
            return PageddError(answer.code, answer.message, field=answer.field)
        case Failed():
            return PageddError(answer.code, answer.message, field=answer.field, retry_after_s=answer.retry_after_s)
        case _:
            return PageddError(
                "protocol_version", f"the daemon answered with {type(answer).__name__}, which was not asked"
            )
