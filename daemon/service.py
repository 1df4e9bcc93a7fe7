"""The use cases that both APIs call: start a request, cancel it, change its priority, show the daemon's state.

Owns the live requests. It carries out the actions that `requests.py` decides on, and
knows neither HTTP nor ZeroMQ: a request's messages go to a `Sink` that its API gave.
"""

import asyncio
import logging
import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pagedd.client.errors import PageddError
from pagedd.client.protocol import Chat, DaemonMessage, Failed, Generate
from pagedd.client.stats_frame import Ending, StatsFrame
from pagedd.daemon import admission, poison
from pagedd.daemon.caller import Caller
from pagedd.daemon.config import DaemonConfig
from pagedd.daemon.crash_reports import Crash, CrashReports, InFlight, state_directory
from pagedd.daemon.doctor import Doctor
from pagedd.daemon.engine_host import EngineState
from pagedd.daemon.events import EventLog
from pagedd.daemon.frames import Frames
from pagedd.daemon.host import Host
from pagedd.daemon.metering import Meter, Metering
from pagedd.daemon.metrics import EngineCollector, Metrics, RequestTimes
from pagedd.daemon.requests import (
    Abort,
    Admitted,
    Broken,
    Cancelled,
    ClientGone,
    Event,
    LiveRequest,
    Phase,
    Produced,
    Send,
    Submit,
)
from pagedd.daemon.served_model import ServedModel
from pagedd.daemon.telemetry import Reading
from pagedd.engine.freed_memory import return_freed_memory
from pagedd.engine.info import EngineInfo
from pagedd.engine.request import Preemption, Request, SequenceOutput

log = logging.getLogger(__name__)

# Called in the event loop with each message of a request, in order. It must not wait and must not raise.
Sink = Callable[[DaemonMessage], None]

_RETRY_AFTER_S = (1, 60)
_ENDINGS_KEPT = 32


@dataclass(slots=True, eq=False)
class LiveEntry:
    """One live request with what only the service knows of it. Mutated only by `Service`.

    Attributes:
        digest: once it is admitted, what stands for it in crash reports and, with its caller, in `poison.py`.
        failure: the code of its `Failed`, once it has heard one.
    """

    request: LiveRequest
    message: Generate | Chat
    caller: Caller
    send: Sink
    times: RequestTimes
    meter: Meter
    digest: bytes = b""
    failure: str | None = None

    @property
    def suspect(self) -> poison.Suspect:
        return self.caller.tag, self.digest


class Service:
    """The front's heart. One event loop; every method runs in it, and only tokenizing long texts leaves it.

    Attributes:
        read_machine: what processes and devices are doing, for the statistics; any thread may call it. Set by
            `server.py`.
        events: what happened lately, for the statistics.
        endings: how the last requests ended, likewise.
        metering: who may have how much, and what it costs.
        doctor: what should be changed.
    """

    def __init__(self, config: DaemonConfig, host: Host, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` is the quotas'; replaceable so that tests decide what time it is."""
        self.host = host
        self.read_machine: Callable[[], Reading] = Reading
        self.events = EventLog()
        self.endings: deque[Ending] = deque(maxlen=_ENDINGS_KEPT)
        self.metering = Metering(config, clock)
        self.doctor = Doctor(self.metering.accounts, caches_prefixes=config.enable_prefix_caching, clock=clock)
        self.model: ServedModel | None = None
        self.started_s = time.monotonic()
        self.started_unix_s = int(time.time())
        self._config = config
        self._live: dict[str, LiveEntry] = {}
        self._suspects = poison.Suspects()
        self._crash_reports = CrashReports(state_directory() / "crashes")
        self._admissions: set[asyncio.Task[None]] = set()
        self._frames = Frames(self)
        self._is_draining = False
        self._has_drained = asyncio.Event()
        self._request_ended = asyncio.Event()
        self._idle_since_s = time.monotonic()
        self._engine_figures = EngineCollector(lambda: host.stats, lambda: host.info, lambda: host.has_fallen_back)
        self.metrics = Metrics(self._engine_figures)
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
        model = ServedModel(prepared_folder, self._config.served_model_name)
        return_freed_memory()
        self._engine_figures.model_name = model.name
        self.model = model

    def begin_drain(self) -> None:
        """Takes no new request; those that run go on."""
        self._is_draining = True
        if not self._live:
            self._has_drained.set()

    async def drained(self) -> None:
        """Returns when the last request has ended after `begin_drain`."""
        await self._has_drained.wait()

    async def close(self) -> None:
        """Ends what still runs, each with its terminal message."""
        self.begin_drain()
        for task in list(self._admissions):
            task.cancel()
        for entry in list(self._live.values()):
            self._apply(entry, Broken("shutting_down", "the daemon is stopping", engine_has_it=True))
        if self.model is not None:
            self.model.close()

    # Sleep

    async def sleep(self) -> None:
        """Gives the device back: running requests may end as when the daemon stops, then the engine process goes.

        The next request starts it again, and waits for it. Raises `PageddError` when there is no engine that could end.
        """
        if self.host.is_sleeping:
            return
        self.host.begin_sleep()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.drain_seconds):
                while self._running():
                    await self._request_ended.wait()
        await self.host.sleep()

    @property
    def idle_s(self) -> float:
        """How long the engine has been ready without a request; 0 while there is one, or no engine."""
        if self._live or self.host.state is not EngineState.READY:
            return 0.0
        return time.monotonic() - self._idle_since_s

    # Requests

    def start(self, messages: Sequence[Generate | Chat], caller: Caller, send: Sink) -> list[str]:
        """Starts the prompts of one request, all or none; returns their daemon-given ids.

        For each of `messages`, under its `id`, `send` hears `Accepted`, any number of `Delta`, and one `Done` or
        `Failed`; a refusal may come before this returns.
        """
        now_s = time.monotonic()
        entries = [self._entry(message, caller, send, now_s) for message in messages]
        ids = [entry.request.request_id for entry in entries]
        is_held = self.host.is_sleeping
        try:
            model = self._check_door(entries)
            if not is_held:
                self._enter_quotas(entries, model)
        except PageddError as error:
            self._refuse(entries, error)
            return ids
        for entry in entries:
            self._live[entry.request.request_id] = entry
        task = asyncio.get_running_loop().create_task(self._admit(entries, model, is_held))
        self._admissions.add(task)
        task.add_done_callback(self._admissions.discard)
        return ids

    def is_live(self, request_id: str) -> bool:
        return request_id in self._live

    def cancel(self, request_id: str, by: Caller | None = None) -> bool:
        """Ends a request; its client hears `Done` with what there is. False when no live request has that id.

        `by` is the administrator who asks; None is the client itself.
        """
        was_live = self._apply_to(request_id, Cancelled())
        if was_live:
            self.events.add("cancel", f"by {by.name}" if by is not None else "by its client", request_id)
        return was_live

    def client_gone(self, request_id: str) -> None:
        """Ends a request that nobody listens to."""
        if self._apply_to(request_id, ClientGone()):
            self.events.add("cancel", "its client is gone", request_id)

    def client_too_slow(self, request_id: str, backlog: str) -> None:
        """Ends a request whose client does not read; `backlog` says in words how much waits for it."""
        message = f"{backlog} wait unread; read faster, or do not stream"
        self._apply_to(request_id, Broken("client_too_slow", message, engine_has_it=True))

    def set_priority(self, request_id: str, priority: int, by: Caller) -> bool:
        """False when no live request has that id. Raises `PageddError` for a priority out of range."""
        admission.LIMITS["priority"].check(priority)
        entry = self._live.get(request_id)
        if entry is None:
            return False
        before, entry.message.priority = entry.message.priority, priority
        if priority != before:
            self.events.add("priority", f"from {before} to {priority} by {by.name}", request_id)
        if entry.request.phase is Phase.RUNNING:
            self.host.set_priority(request_id, priority)
        return True

    # Text

    def served_model(self) -> ServedModel:
        """Raises `PageddError("engine_loading")` before the model's text side is ready."""
        if self.model is None:
            self.host.check_ready()
            raise PageddError("engine_loading", f"{self.host.describe()}; try again shortly")
        return self.model

    async def tokenize(self, message: Generate | Chat) -> list[int]:
        """The prompt's ids, as a request with the same fields would have them. Raises `PageddError`."""
        model = self.served_model()
        admission.check_message(message, model.name)
        if (info := self.host.info) is not None:
            admission.check_text_length(message, model.max_token_bytes, info)
        return await model.prompt_token_ids(message)

    def detokenize(self, token_ids: list[int]) -> str:
        """Text of `token_ids`, control tokens spelled out. Raises `PageddError("token_out_of_vocabulary")`."""
        tokenizer = self.served_model().tokenizer
        admission.check_vocabulary("tokens", token_ids, tokenizer.vocab_size)
        return tokenizer.decode(token_ids, skip_special=False)

    # State

    @property
    def state(self) -> str:
        """In one word, for people and machines; `stopping` while the daemon drains."""
        return "stopping" if self._is_draining else self.host.state.value

    def check_open(self) -> ServedModel:
        """The model that requests can be started on. Raises a `PageddError` with status 503 when there is none now."""
        if self._is_draining:
            raise PageddError("shutting_down", "the daemon is stopping; try again when it is back")
        model = self.served_model()
        if not self.host.is_sleeping:
            self.host.check_ready()
        return model

    @property
    def retry_after_s(self) -> int:
        """A guess for clients that were told to come back: as long as the first in the queue has waited so far."""
        stats = self.host.stats
        low, high = _RETRY_AFTER_S
        return min(high, max(low, math.ceil(stats.oldest_wait_s))) if stats is not None else low

    async def stats_frame(self, blocks: bool, viewer: Caller | None = None) -> StatsFrame:
        """A picture of this moment; see `frames.py`."""
        return await self._frames.make(blocks=blocks, viewer=viewer)

    def note_failure(self, failure: PageddError | Failed, request_id: str = "") -> None:
        """A message was refused, or its request broke."""
        self.metrics.failed(failure.code)
        self.events.refused(failure.code, failure.message, request_id, failure.field)

    def live_entries(self) -> Iterable[LiveEntry]:
        return self._live.values()

    def live_entry(self, request_id: str) -> LiveEntry | None:
        return self._live.get(request_id)

    # Admission

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
        return LiveEntry(request, message, caller, send, RequestTimes(now_s, {}), self.metering.open(caller))

    def _check_door(self, entries: Sequence[LiveEntry]) -> ServedModel:
        """What can be refused at once, before anything is allocated for the request."""
        model = self.check_open()
        messages = [entry.message for entry in entries]
        for message in messages:
            admission.check_message(message, model.name)
        admission.check_num_choices(messages, self._config.max_prompts_per_request)
        self._check_queue(sum(message.sampling.n for message in messages))
        return model

    def _enter_quotas(self, entries: Sequence[LiveEntry], model: ServedModel) -> None:
        pairs = [(entry.meter, entry.message) for entry in entries]
        self.metering.enter(pairs, model.max_token_bytes, self._engine_info())

    def _check_queue(self, num_new: int) -> None:
        """The queue is the live choices that cannot have a seat, whatever the engine is doing with the others."""
        num_live = sum(entry.request.num_choices for entry in self._live.values())
        num_waiting = max(0, num_live - self._config.max_num_seqs)
        if num_live + num_new > self._config.max_num_seqs + self._config.max_queued_requests:
            raise PageddError(
                "queue_full",
                f"{num_waiting} wait and {num_new} came, limit {self._config.max_queued_requests}; "
                f"try again in {self.retry_after_s} s",
            )

    async def _admit(self, entries: list[LiveEntry], model: ServedModel, is_held: bool) -> None:
        """Validates and tokenizes all, then submits all: a bad prompt among many leaves nothing behind.

        `is_held`: the engine sleeps, and they wait until it is awake.
        """
        try:
            if is_held:
                await self._awake()
                entries = [entry for entry in entries if not entry.request.has_ended]
                self._enter_quotas(entries, model)
            requests = [await self._engine_request(entry, model) for entry in entries]
            # Whoever left meanwhile holds nothing any more, and must not begin to.
            live = [pair for pair in zip(entries, requests, strict=True) if not pair[0].request.has_ended]
            admitted = self.metering.admit([(entry.meter, request) for entry, request in live], self._engine_info())
        except PageddError as error:
            self._refuse(entries, error)
            return
        except Exception:
            request_id = entries[0].request.request_id
            log.exception("a request could not be admitted", extra={"request_id": request_id})
            self._refuse(entries, PageddError("internal", f"the log has the trace under request {request_id}"))
            return
        suspects = []
        for (entry, _), request in zip(live, admitted, strict=True):
            if entry.suspect in self._suspects:
                suspects.append((entry, request))
            else:
                self._submit(entry, request, model)
        for entry, request in suspects:
            await self._admit_suspect(entry, request, model)

    def _submit(self, entry: LiveEntry, request: Request, model: ServedModel) -> None:
        entry.request.open_texts(model.tokenizer)
        self._apply(entry, Admitted(request))

    async def _admit_suspect(self, entry: LiveEntry, request: Request, model: ServedModel) -> None:
        """Waits until no other suspect is in the engine: `poison.py` says why."""
        try:
            while self.host.is_sleeping or any(other.suspect in self._suspects for other in self._running()):
                if self.host.is_sleeping:
                    await self._awake()
                else:
                    await self._request_ended.wait()
                if entry.request.has_ended:
                    return
            self._suspects.check(entry.suspect)
        except PageddError as error:
            self._refuse([entry], error)
        else:
            self._submit(entry, request, model)

    async def _engine_request(self, entry: LiveEntry, model: ServedModel) -> Request:
        admission.check_text_length(entry.message, model.max_token_bytes, self._engine_info())
        token_ids = await model.prompt_token_ids(entry.message)
        extras = admission.cache_extras(entry.message, entry.caller, self._config.prefix_sharing)
        if entry.message.cache_salt is None:
            self.doctor.saw_prompt(token_ids, extras)
        info = self._engine_info()  # again, because another engine may have started meanwhile
        request = admission.to_engine_request(
            entry.message,
            entry.request.request_id,
            token_ids,
            info,
            quota_tokens=self.metering.most_tokens(entry.meter, info),
            eos_token_ids=model.prepared.eos_token_ids,
            cache_extras=extras,
        )
        entry.digest = poison.digest(request)
        self._suspects.check(entry.suspect)
        return request

    async def _awake(self) -> None:
        """Wakes the engine. Raises `PageddError` when it cannot be had."""
        self.host.wake()
        while self.host.is_sleeping:
            await self.host.wait_changed()
        self.host.check_ready()

    def _engine_info(self) -> EngineInfo:
        self.host.check_ready()
        if self.host.info is None:
            raise PageddError("engine_died", "the engine process has just ended; try again shortly")
        return self.host.info

    def _refuse(self, entries: Sequence[LiveEntry], error: PageddError) -> None:
        for entry in entries:
            self._apply(entry, Broken(error.code, error.message, error.field, retry_after_s=error.retry_after_s))

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
                self._apply(entry, Produced(output))
        if (stats := self.host.stats) is not None:
            self.metrics.stepped(stats)
            self.metering.stepped(stats, len(outputs) - num_first)
            self.events.saw_evictions(stats.evictions_total)

    def _on_refused(self, request_id: str, code: str, message: str) -> None:
        self._apply_to(request_id, Broken(code, message))

    def _on_lost(self, reason: str) -> None:
        self._engine_figures.engine_lost()
        lost = self._running()
        self._suspects.engine_died([entry.suspect for entry in lost])
        self._crash_reports.keep(self._crash(reason, lost))
        for entry in lost:
            self._apply(entry, Broken("engine_died", reason))

    def _on_ended(self) -> None:
        self._engine_figures.engine_lost()
        for entry in self._running():
            self._apply(entry, Broken("engine_asleep", "it did not end in time; send it again to wake the engine"))

    def _on_state(self) -> None:
        self.events.engine_is(self.host.state, self.host.detail, self.host.info)
        self._idle_since_s = time.monotonic()

    def _running(self) -> list[LiveEntry]:
        return [entry for entry in self._live.values() if entry.request.phase is Phase.RUNNING]

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

    # Carrying out

    def _apply_to(self, request_id: str, event: Event) -> bool:
        entry = self._live.get(request_id)
        if entry is None:
            return False
        self._apply(entry, event)
        return True

    def _apply(self, entry: LiveEntry, event: Event) -> None:
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
                        self.host.submit(engine_request)
                    except PageddError as error:
                        self._apply(entry, Broken(error.code, error.message))
                        return
                case Abort(request_id, choice_index):
                    self.host.abort(request_id, choice_index)
                case Send(message):
                    if isinstance(message, Failed):
                        entry.failure = message.code
                        self.note_failure(message, request.request_id)
                    entry.send(message)
        if request.has_ended:
            self._forget(entry)

    def _forget(self, entry: LiveEntry) -> None:
        request = entry.request
        if self._live.pop(request.request_id, None) is None:
            return  # refused before it was live
        self._idle_since_s = time.monotonic()
        self._request_ended.set()
        self._request_ended.clear()
        outcome = entry.failure or request.outcome or "abort"
        self.endings.append(Ending(request_id=request.request_id, outcome=outcome))
        self.metering.leave(entry.meter, is_callers_doing=request.outcome != "error")
        was_admitted = request.num_prompt_tokens > 0
        if request.outcome in ("stop", "length"):
            self._suspects.clear(entry.suspect)
        if was_admitted and request.outcome is not None and request.outcome != "error":
            self.metrics.finished(
                entry.times, request.outcome, request.num_prompt_tokens, request.num_output_tokens, time.monotonic()
            )
        if self._is_draining and not self._live:
            self._has_drained.set()
