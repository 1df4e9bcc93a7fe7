"""The requests that have begun and not ended, and what each of their events leads to.

Owns the table and the carrying out of what `requests.py` decides: messages go to a request's `Sink`, orders to the
engine, figures to metrics and metering. Knows neither HTTP nor ZeroMQ, nor how a request gets here (`intake.py`).
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pagedd.client.errors import PageddError
from pagedd.client.protocol import Chat, DaemonMessage, Failed, Generate
from pagedd.client.stats_frame import Ending
from pagedd.daemon import poison
from pagedd.daemon.caller import Caller
from pagedd.daemon.events import EventLog
from pagedd.daemon.host import Host
from pagedd.daemon.metering import Meter, Metering
from pagedd.daemon.metrics import Metrics, RequestTimes
from pagedd.daemon.requests import Abort, Broken, Event, LiveRequest, Phase, Send, Submit

log = logging.getLogger(__name__)

# Called in the event loop with each message of a request, in order. It must not wait and must not raise.
Sink = Callable[[DaemonMessage], None]

_ENDINGS_KEPT = 32


@dataclass(slots=True, eq=False)
class LiveEntry:
    """One live request with what only the front knows of it. Mutated only by `Service` and its parts.

    Attributes:
        digest: once it is admitted, what stands for it in crash reports and, with its caller, in `poison.py`.
        prompt_token_ids: once it is admitted, where the request log wants them.
        failure: the code of its `Failed`, once it has heard one.
        trace_context: of the caller's span, where requests are traced; `tracing.py` knows what is in it.
    """

    request: LiveRequest
    message: Generate | Chat
    caller: Caller
    send: Sink
    times: RequestTimes
    meter: Meter
    digest: bytes = b""
    prompt_token_ids: list[int] | None = None
    failure: str | None = None
    trace_context: Any = None

    @property
    def suspect(self) -> poison.Suspect:
        return self.caller.tag, self.digest


class LiveRequests:
    """The table. One event loop.

    Attributes:
        endings: how the last requests ended, the newest at the end.
        idle_since_s: when the last one ended, by `time.monotonic`.
    """

    def __init__(
        self,
        host: Host,
        metrics: Metrics,
        metering: Metering,
        events: EventLog,
        suspects: poison.Suspects,
        on_ended: Callable[[LiveEntry], None],
    ) -> None:
        """`on_ended` hears of each that is over; it must not wait."""
        self.endings: deque[Ending] = deque(maxlen=_ENDINGS_KEPT)
        self.idle_since_s = time.monotonic()
        self._host = host
        self._metrics = metrics
        self._metering = metering
        self._events = events
        self._suspects = suspects
        self._on_ended = on_ended
        self._entries: dict[str, LiveEntry] = {}
        self._one_ended = asyncio.Event()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[LiveEntry]:
        return iter(list(self._entries.values()))

    def get(self, request_id: str) -> LiveEntry | None:
        return self._entries.get(request_id)

    def enter(self, entry: LiveEntry) -> None:
        self._entries[entry.request.request_id] = entry

    def running(self) -> list[LiveEntry]:
        """Those that the engine has."""
        return [entry for entry in self._entries.values() if entry.request.phase is Phase.RUNNING]

    @property
    def num_choices(self) -> int:
        return sum(entry.request.num_choices for entry in self._entries.values())

    async def wait_ended(self) -> None:
        """Returns when the next one ends."""
        await self._one_ended.wait()

    def apply_to(self, request_id: str, event: Event) -> bool:
        """False when no live request has that id."""
        entry = self._entries.get(request_id)
        if entry is None:
            return False
        self.apply(entry, event)
        return True

    def apply(self, entry: LiveEntry, event: Event) -> None:
        """Carries out what the event leads to; a fault ends this request alone."""
        request = entry.request
        try:
            actions = request.handle(event)
        except Exception:
            # A fault in one request's text must not take the others with it.
            log.exception("a request broke", extra={"request_id": request.request_id})
            text = f"the log has the trace under request {request.request_id}"
            actions = request.handle(Broken("internal", text, engine_has_it=True))
        for action in actions:
            match action:
                case Submit(engine_request):
                    try:
                        self._host.submit(engine_request)
                    except PageddError as error:
                        self.apply(entry, Broken(error.code, error.message))
                        return
                case Abort(request_id, choice_index):
                    self._host.abort(request_id, choice_index)
                case Send(message):
                    if isinstance(message, Failed):
                        entry.failure = message.code
                        self.note_failure(message, request.request_id)
                    entry.send(message)
        if request.has_ended:
            self._forget(entry)

    def note_failure(self, failure: PageddError | Failed, request_id: str = "") -> None:
        """A message was refused, or its request broke."""
        self._metrics.failed(failure.code)
        self._events.refused(failure.code, failure.message, request_id, failure.field)

    def _forget(self, entry: LiveEntry) -> None:
        request = entry.request
        if self._entries.pop(request.request_id, None) is None:
            return  # refused before it was live
        self.idle_since_s = time.monotonic()
        self._one_ended.set()
        self._one_ended.clear()
        outcome = entry.failure or request.outcome or "abort"
        self.endings.append(Ending(request_id=request.request_id, outcome=outcome))
        self._metering.leave(entry.meter, is_callers_doing=request.outcome != "error")
        was_admitted = request.num_prompt_tokens > 0
        if request.outcome in ("stop", "length"):
            self._suspects.clear(entry.suspect)
        if was_admitted and request.outcome is not None and request.outcome != "error":
            self._metrics.finished(
                entry.times, request.outcome, request.num_prompt_tokens, request.num_output_tokens, time.monotonic()
            )
        try:
            self._on_ended(entry)
        except Exception:
            log.exception("fault while the end of request %s was told", request.request_id)
