"""Suspend and resume, as systemd-logind tells of them over D-Bus: a moment before, and once the machine is back.

Owns the connection to the system bus and the lock that makes logind wait (systemd.io/INHIBITOR_LOCKS). What is done in
that moment is its callers'. Needs the package dbus-fast (`pagedd[desktop]`); without it, or without a bus, nothing
happens.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dbus_fast.aio import MessageBus

log = logging.getLogger(__name__)

_LOGIND = "org.freedesktop.login1"
_PATH = "/org/freedesktop/login1"
_MANAGER = "org.freedesktop.login1.Manager"
_RULE = f"type='signal',sender='{_LOGIND}',interface='{_MANAGER}',member='PrepareForSleep',path='{_PATH}'"
# What logind waits by default, and how much of its patience is left for letting go.
_DEFAULT_DELAY_S = 5.0
_MARGIN_S = 1.0


class Logind:
    """Tells of suspends, and holds each up until `on_suspend` is done or logind's patience is over.

    Args:
        on_suspend: called before; it is to take no longer than the seconds that it is given.
        on_resume: called after.
    """

    def __init__(
        self, on_suspend: Callable[[float], Awaitable[None]], on_resume: Callable[[], Awaitable[None]]
    ) -> None:
        self._on_suspend = on_suspend
        self._on_resume = on_resume
        self._bus: MessageBus | None = None
        self._lock_fd: int | None = None
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_ready(self) -> bool:
        """Whether logind waits for this daemon."""
        return self._lock_fd is not None

    async def watch(self) -> None:
        """Until it is cancelled, or the bus goes; returns at once where there is none."""
        try:
            from dbus_fast import BusType
            from dbus_fast.aio import MessageBus

            self._bus = await MessageBus(bus_type=BusType.SYSTEM, negotiate_unix_fd=True).connect()
        except Exception as error:
            # No package, no bus, no permission: each has an exception of its own, and none concerns serving.
            log.debug("suspends are not noticed: %s", error)
            return
        try:
            self._bus.add_message_handler(self._hear)
            await self._call("org.freedesktop.DBus", "/org/freedesktop/DBus", "org.freedesktop.DBus", "AddMatch", _RULE)
            await self._take_lock()
            await self._bus.wait_for_disconnect()
            log.warning("the system bus is gone; suspends are no longer noticed")
        except Exception as error:
            log.debug("suspends are not noticed: %s", error)
        finally:
            self._release_lock()
            self._bus.disconnect()

    def _hear(self, message: Any) -> None:
        if (message.interface, message.member) == (_MANAGER, "PrepareForSleep"):
            [begins] = message.body
            task = asyncio.get_running_loop().create_task(self._act(bool(begins)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _act(self, begins: bool) -> None:
        async with self._turn:
            try:
                if begins:
                    log.info("the machine is about to suspend")
                    await self._on_suspend(max(0.0, await self._delay_s() - _MARGIN_S))
                else:
                    log.info("the machine is back")
                    await self._take_lock()
                    await self._on_resume()
            except Exception:
                log.exception("fault at a suspend or resume")
            finally:
                if begins:
                    self._release_lock()

    async def _take_lock(self) -> None:
        reply = await self._call(
            _LOGIND, _PATH, _MANAGER, "Inhibit", "sleep", "pagedd", "requests end and the GPU is left", "delay"
        )
        self._release_lock()
        self._lock_fd = reply.unix_fds[reply.body[0]]

    def _release_lock(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    async def _delay_s(self) -> float:
        try:
            reply = await self._call(
                _LOGIND, _PATH, "org.freedesktop.DBus.Properties", "Get", _MANAGER, "InhibitDelayMaxUSec"
            )
            return float(reply.body[0].value) / 1e6
        except Exception as error:
            log.debug("logind does not say how long it waits: %s", error)
            return _DEFAULT_DELAY_S

    async def _call(self, destination: str, path: str, interface: str, member: str, *texts: str) -> Any:
        """A method that takes texts. Raises `RuntimeError` when it is answered with an error."""
        from dbus_fast import Message, MessageType

        assert self._bus is not None
        reply = await self._bus.call(
            Message(
                destination=destination,
                path=path,
                interface=interface,
                member=member,
                signature="s" * len(texts),
                body=list(texts),
            )
        )
        if reply is None or reply.message_type is MessageType.ERROR:
            raise RuntimeError(f"{member}: {reply.error_name if reply is not None else 'no answer'}")
        return reply
