"""The use cases that both APIs call: start a request, cancel it, change its priority, show the daemon's state.

Owns what the engine's fate means for its requests. How a request gets in is `intake.py`'s, what becomes of it
`live_requests.py`'s, when the engine sleeps `device_use.py`'s. Knows neither HTTP nor ZeroMQ: a request's messages go
to a `Sink` that its API gave.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from pagedd.client.errors import PageddError
from pagedd.client.protocol import Chat, Failed, Generate
from pagedd.client.stats_frame import Ending, StatsFrame
from pagedd.daemon import poison
from pagedd.daemon.caller import Caller
from pagedd.daemon.config import DaemonConfig
from pagedd.daemon.crash_reports import Crash, CrashReports, InFlight, state_directory
from pagedd.daemon.device_use import DeviceUse
from pagedd.daemon.doctor import Doctor
from pagedd.daemon.engine_state import EngineState
from pagedd.daemon.events import EventLog
from pagedd.daemon.frames import Frames
from pagedd.daemon.host import Host
from pagedd.daemon.intake import Intake
from pagedd.daemon.limits import PRIORITY
from pagedd.daemon.live_requests import LiveEntry, LiveRequests, Sink
from pagedd.daemon.metering import Metering
from pagedd.daemon.metrics import EngineCollector, Metrics, RequestTimes
from pagedd.daemon.request_log import RequestLog
from pagedd.daemon.requests import Broken, Cancelled, ClientGone, LiveRequest, Phase, Produced
from pagedd.daemon.served_model import ServedModel
from pagedd.daemon.telemetry import Reading
from pagedd.daemon.text_questions import TextQuestions
from pagedd.daemon.tracing import Tracing
from pagedd.daemon.wall_clock import unix_s
from pagedd.engine.freed_memory import return_freed_memory
from pagedd.engine.request import Preemption, SequenceOutput

log = logging.getLogger(__name__)


class Service:
    """The front's heart. One event loop; every method runs in it, and only tokenizing long texts leaves it.

    Attributes:
        read_machine: what processes and devices are doing, for the statistics; any thread may call it. Set by
            `server.py`.
        device: whether the engine has the device, and with which model.
        events: what happened lately, for the statistics.
        metering: who may have how much, and what it costs.
        doctor: what should be changed.
        text: questions that need no engine.
    """

    def __init__(self, config: DaemonConfig, host: Host, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` is the quotas'; replaceable so that tests decide what time it is."""
        self.host = host
        self.read_machine: Callable[[], Reading] = Reading
        self.events = EventLog()
        self.metering = Metering(config, clock)
        self.doctor = Doctor(self.metering.accounts, caches_prefixes=config.enable_prefix_caching, clock=clock)
        self.model: ServedModel | None = None
        self.started_s = time.monotonic()
        self.started_unix_s = int(unix_s())
        self.max_prompts_per_request = config.max_prompts_per_request
        self._config = config
        self._suspects = poison.Suspects()
        self._crash_reports = CrashReports(state_directory() / "crashes")
        self._frames = Frames(self)
        self._is_draining = False
        self._ready_since_s = time.monotonic()
        self._engine_figures = EngineCollector(lambda: host.stats, lambda: host.info, lambda: host.has_fallen_back)
        # Until the model is known by its own.
        self._engine_figures.model_name = config.served_model_name or config.model
        self.metrics = Metrics(self._engine_figures)
        self._request_log = RequestLog(config.request_log)
        self._request_log.announce()
        self._tracing = None if config.otel_endpoint is None else Tracing(config.otel_endpoint)
        self._live = LiveRequests(
            host, self.metrics, self.metering, self.events, self._suspects, self._on_request_ended
        )
        self.device = DeviceUse(config, host, self._live, self.events, self.served_model, self.serve)
        self._intake = Intake(
            config, host, self._live, self.metering, self.doctor, self._suspects, self.served_model, self.device.wake
        )
        self.text = TextQuestions(config, self.metering, self.served_model, self._intake.check_queue)
        host.on_preempted = self._on_preempted
        host.on_outputs = self._on_outputs
        host.on_refused = self._on_refused
        host.on_lost = self._on_lost
        host.on_ended = self._on_ended
        host.on_state = self._on_state

    # Life

    def set_model(self, prepared_folder: Path) -> None:
        """Text can be handled from now on. Reads files for some tenths of a second, and may be called in a thread.

        Raises `PageddError("unsupported_model")` for a tokenizer that cannot be handled exactly.
        """
        self.serve(ServedModel(prepared_folder, self._config.served_model_name))

    def serve(self, model: ServedModel) -> None:
        """This is the model from now on; the engine's is the host's."""
        return_freed_memory()
        self._engine_figures.model_name = model.name
        self.model = model
        self.events.add("model", f"serves {model.name}")

    def reopen_logs(self) -> None:
        """The file of the request log may have been moved away."""
        self._request_log.close()

    def begin_drain(self) -> None:
        """Takes no new request; those that run go on."""
        self._is_draining = True

    async def drained(self) -> None:
        """Returns when the last request has ended after `begin_drain`."""
        while self._live:
            await self._live.wait_ended()

    async def close(self) -> None:
        """Ends what still runs, each with its terminal message."""
        self.begin_drain()
        self._intake.close()
        await self.device.close()
        for entry in self._live:
            self._live.apply(entry, Broken("shutting_down", "the daemon is stopping", engine_has_it=True))
        self._request_log.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)
        if self.model is not None:
            self.model.close()

    @property
    def idle_s(self) -> float:
        """How long the engine has been ready without a request; 0 while there is one, or no engine."""
        if self._live or self.host.state is not EngineState.READY:
            return 0.0
        return time.monotonic() - max(self._ready_since_s, self._live.idle_since_s)

    async def sleep_if_idle(self, limit_s: float) -> None:
        """Gives the device back when no request has come for so long, unless a model is being loaded just now."""
        if self.idle_s < limit_s:
            return
        log.info("no request for %g s", limit_s)
        try:
            await self.device.sleep()
        except PageddError as error:
            log.info("the engine is not put to sleep: %s", error)

    # Requests

    def start(self, messages: Sequence[Generate | Chat], caller: Caller, send: Sink) -> list[str]:
        """Starts the prompts of one request, all or none; returns their daemon-given ids.

        For each of `messages`, under its `id`, `send` hears `Accepted`, any number of `Delta`, and one `Done` or
        `Failed`; a refusal may come before this returns.
        """
        now_s = time.monotonic()
        entries = [self._entry(message, caller, send, now_s) for message in messages]
        ids = [entry.request.request_id for entry in entries]
        try:
            model = self.check_open()
            self._intake.check_door(entries, model)
        except PageddError as error:
            self._intake.refuse(entries, error)
            return ids
        for entry in entries:
            self._live.enter(entry)
        self._intake.begin(entries, model)
        return ids

    def is_live(self, request_id: str) -> bool:
        return self._live.get(request_id) is not None

    def cancel(self, request_id: str, by: Caller | None = None) -> bool:
        """Ends a request; its client hears `Done` with what there is. False when no live request has that id.

        `by` is the administrator who asks; None is the client itself.
        """
        was_live = self._live.apply_to(request_id, Cancelled())
        if was_live:
            self.events.add("cancel", f"by {by.name}" if by is not None else "by its client", request_id)
        return was_live

    def client_gone(self, request_id: str) -> None:
        """Ends a request that nobody listens to."""
        if self._live.apply_to(request_id, ClientGone()):
            self.events.add("cancel", "its client is gone", request_id)

    def client_too_slow(self, request_id: str, backlog: str) -> None:
        """Ends a request whose client does not read; `backlog` says in words how much waits for it."""
        message = f"{backlog} wait unread; read faster, or do not stream"
        self._live.apply_to(request_id, Broken("client_too_slow", message, engine_has_it=True))

    def set_priority(self, request_id: str, priority: int, by: Caller) -> bool:
        """False when no live request has that id. Raises `PageddError` for a priority out of range."""
        PRIORITY.check(priority)
        entry = self._live.get(request_id)
        if entry is None:
            return False
        before, entry.message.priority = entry.message.priority, priority
        if priority != before:
            self.events.add("priority", f"from {before} to {priority} by {by.name}", request_id)
        if entry.request.phase is Phase.RUNNING:
            self.host.set_priority(request_id, priority)
        return True

    @property
    def max_request_tokens(self) -> int:
        """Prompt and output of the longest request that can be served, as far as that is known without an engine."""
        if (info := self.host.info) is not None:
            return info.max_request_tokens
        context_length = self.served_model().prepared.context_length
        return min(context_length, self._config.max_model_len or context_length)

    def served_model(self) -> ServedModel:
        """Raises `PageddError("engine_loading")` before the model's text side is ready."""
        if self.model is None:
            self.host.check_ready()
            raise PageddError("engine_loading", f"{self.host.describe()}; try again shortly")
        return self.model

    # State

    @property
    def state(self) -> str:
        """In one word, for people and machines: the engine's, `yielding`, or `stopping` while the daemon drains."""
        return "stopping" if self._is_draining else self.device.state

    def describe(self) -> str:
        """The state in words."""
        return self.device.describe()

    def check_open(self) -> ServedModel:
        """The model that requests can be started on. Raises a `PageddError` with status 503 when there is none now."""
        if self._is_draining:
            raise PageddError("shutting_down", "the daemon is stopping; try again when it is back")
        self.device.check_not_yielded()
        model = self.served_model()
        if not self.host.is_sleeping:
            self.host.check_ready()
        return model

    @property
    def retry_after_s(self) -> int:
        """A guess for clients that were told to come back."""
        return self._intake.retry_after_s

    async def stats_frame(self, blocks: bool, viewer: Caller | None = None) -> StatsFrame:
        """A picture of this moment; see `frames.py`."""
        return await self._frames.make(blocks=blocks, viewer=viewer)

    def note_failure(self, failure: PageddError | Failed, request_id: str = "") -> None:
        """A message was refused, or its request broke."""
        self._live.note_failure(failure, request_id)

    @property
    def endings(self) -> Sequence[Ending]:
        """How the last requests ended, the newest at the end."""
        return self._live.endings

    def live_entries(self) -> Iterable[LiveEntry]:
        return iter(self._live)

    def live_entry(self, request_id: str) -> LiveEntry | None:
        return self._live.get(request_id)

    def _entry(self, message: Generate | Chat, caller: Caller, send: Sink, now_s: float) -> LiveEntry:
        request = LiveRequest(
            id=message.id,
            request_id=secrets.token_hex(8),
            model=self.model.name if self.model is not None else message.model,
            num_choices=message.sampling.n,
            stream=message.stream,
            stop=message.sampling.stop,
            min_tokens=message.sampling.min_tokens,
        )
        entry = LiveEntry(request, message, caller, send, RequestTimes(now_s, {}), self.metering.open(caller))
        if self._tracing is not None:
            entry.trace_context = self._tracing.caller_context(message)
        message.traceparent = message.tracestate = None  # of any length, and of no more use
        return entry

    def _on_request_ended(self, entry: LiveEntry) -> None:
        self._request_log.ended(entry)
        if self._tracing is not None:
            self._tracing.ended(entry)

    # What the engine says

    def _on_preempted(self, preemptions: list[Preemption]) -> None:
        self.events.preempted(preemptions)
        self.doctor.preempted(preemptions)

    def _on_outputs(self, outputs: list[SequenceOutput]) -> None:
        now_s = time.monotonic()
        num_first = 0
        for output in outputs:
            entry = self._live.get(output.request_id)
            if entry is not None:
                num_first += output.choice_index not in entry.times.last_token_s
                self.metrics.produced(entry.times, output, now_s)
                self.metering.produced(entry.meter, output)
                self._live.apply(entry, Produced(output))
        if (stats := self.host.stats) is not None:
            self.metrics.stepped(stats)
            self.metering.stepped(stats, len(outputs) - num_first)
            self.events.saw_evictions(stats.evictions_total)

    def _on_refused(self, request_id: str, code: str, message: str) -> None:
        self._live.apply_to(request_id, Broken(code, message))

    def _on_lost(self, reason: str) -> None:
        self._engine_figures.engine_lost()
        lost = self._live.running()
        self._suspects.engine_died([entry.suspect for entry in lost])
        self._crash_reports.keep(self._crash(reason, lost))
        for entry in lost:
            self._live.apply(entry, Broken("engine_died", reason))

    def _on_ended(self) -> None:
        self._engine_figures.engine_lost()
        for entry in self._live.running():
            self._live.apply(entry, self.device.why_it_ended())

    def _on_state(self) -> None:
        is_yielded = self.device.is_yielded and self.host.state is EngineState.ASLEEP
        detail = "others have the device" if is_yielded else self.host.detail
        self.events.engine_is(self.host.state, detail, self.host.info)
        self._ready_since_s = time.monotonic()

    def _crash(self, reason: str, lost: Sequence[LiveEntry]) -> Crash:
        in_flight = tuple(
            InFlight(
                entry.request.request_id,
                entry.digest,
                entry.caller.name,
                entry.request.num_prompt_tokens,
                entry.request.num_output_tokens,
            )
            for entry in lost
        )
        return Crash(
            reason=reason, trace=self.host.trace, info=self.host.info, stats=self.host.stats, in_flight=in_flight
        )
