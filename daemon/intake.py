"""From messages at the door to requests in the engine: checks, quotas, text to token ids, and the engine's wakening.

Owns the tasks in which that happens. Of the prompts of one request all get in or none. What may be asked for is
`admission.py`'s; what becomes of a request that is in is `live_requests.py`'s.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Sequence

from pagedd.client.errors import PageddError
from pagedd.daemon import admission, poison
from pagedd.daemon.config import DaemonConfig
from pagedd.daemon.doctor import Doctor
from pagedd.daemon.host import Host
from pagedd.daemon.live_requests import LiveEntry, LiveRequests
from pagedd.daemon.metering import Metering
from pagedd.daemon.requests import Admitted, Broken, Held, Phase
from pagedd.daemon.served_model import ServedModel
from pagedd.engine.info import EngineInfo
from pagedd.engine.request import Request

log = logging.getLogger(__name__)

_RETRY_AFTER_S = (1, 60)


class Intake:
    """The way in. One event loop; only tokenizing long texts leaves it."""

    def __init__(
        self,
        config: DaemonConfig,
        host: Host,
        requests: LiveRequests,
        metering: Metering,
        doctor: Doctor,
        suspects: poison.Suspects,
        served_model: Callable[[], ServedModel],
        wake: Callable[[], None],
    ) -> None:
        """`served_model` is what is served now, `wake` wakes the engine; both raise `PageddError` when they cannot."""
        self._wake = wake
        self._config = config
        self._host = host
        self._requests = requests
        self._metering = metering
        self._doctor = doctor
        self._suspects = suspects
        self._served_model = served_model
        self._tasks: set[asyncio.Task[None]] = set()

    def check_door(self, entries: Sequence[LiveEntry], model: ServedModel) -> None:
        """What can be refused at once, before anything is allocated for the request. Raises `PageddError`."""
        messages = [entry.message for entry in entries]
        for message in messages:
            admission.check_message(message, model.name)
        admission.check_num_choices(messages, self._config.max_prompts_per_request)
        admission.check_num_logprobs(messages)
        self.check_queue(sum(message.sampling.n for message in messages))
        if not self._host.is_sleeping:
            self._enter_quotas(entries, model)

    def begin(self, entries: list[LiveEntry], model: ServedModel) -> None:
        """What `check_door` let pass goes on its way; who cannot go on hears why."""
        task = asyncio.get_running_loop().create_task(self._admit_all(entries, model, is_held=self._host.is_sleeping))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def refuse(self, entries: Sequence[LiveEntry], error: PageddError) -> None:
        for entry in entries:
            self._requests.apply(
                entry, Broken(error.code, error.message, error.field, retry_after_s=error.retry_after_s)
            )

    def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()

    @property
    def retry_after_s(self) -> int:
        """A guess for clients that were told to come back: as long as the first in the queue has waited so far."""
        stats = self._host.stats
        low, high = _RETRY_AFTER_S
        return min(high, max(low, math.ceil(stats.oldest_wait_s))) if stats is not None else low

    def check_queue(self, num_new: int) -> None:
        """The queue is the live choices that cannot have a seat, whatever the engine is doing with the others.

        Raises `PageddError("queue_full")` when `num_new` more would be too many.
        """
        num_live = self._requests.num_choices
        num_waiting = max(0, num_live - self._config.max_num_seqs)
        if num_live + num_new > self._config.max_num_seqs + self._config.max_queued_requests:
            raise PageddError(
                "queue_full",
                f"{num_waiting} wait and {num_new} came, limit {self._config.max_queued_requests}; "
                f"try again in {self.retry_after_s} s",
            )

    def _enter_quotas(self, entries: Sequence[LiveEntry], model: ServedModel) -> None:
        pairs = [(entry.meter, entry.message) for entry in entries]
        self._metering.enter(pairs, model.max_token_bytes, self._engine_info())

    async def _admit_all(self, entries: list[LiveEntry], model: ServedModel, is_held: bool) -> None:
        """Each of `entries` is in the engine or has ended when this returns, whatever breaks."""
        try:
            await self._admit(entries, model, is_held)
        except PageddError as error:
            self.refuse(_still_outside(entries), error)
        except Exception:
            request_id = entries[0].request.request_id
            log.exception("a request could not be admitted", extra={"request_id": request_id})
            text = f"the log has the trace under request {request_id}"
            self.refuse(_still_outside(entries), PageddError("internal", text))

    async def _admit(self, entries: list[LiveEntry], model: ServedModel, is_held: bool) -> None:
        """Validates and tokenizes all, then submits all: a bad prompt among many leaves nothing behind.

        `is_held`: the engine sleeps, and they wait until it is awake.
        """
        if is_held:
            for entry in entries:
                self._requests.apply(entry, Held())
            await self._awake()
            entries = _still_outside(entries)
            if not entries:
                return  # everybody left while it slept
            model = self._served_model()  # it may have been loaded meanwhile, in place of the one at the door
            for entry in entries:
                admission.check_message(entry.message, model.name)
            self._enter_quotas(entries, model)
        requests = [await self._engine_request(entry, model) for entry in entries]
        # Whoever left meanwhile holds nothing any more, and must not begin to.
        live = [pair for pair in zip(entries, requests, strict=True) if not pair[0].request.has_ended]
        admitted = self._metering.admit([(entry.meter, request) for entry, request in live], self._engine_info())
        suspects = []
        for (entry, _), request in zip(live, admitted, strict=True):
            if entry.suspect in self._suspects:
                suspects.append((entry, request))
            else:
                self._submit(entry, request, model)
        for entry, request in suspects:
            await self._admit_suspect(entry, request, model)

    def _submit(self, entry: LiveEntry, request: Request, model: ServedModel) -> None:
        if model is not self._served_model():
            self.refuse([entry], PageddError("engine_loading", "another model was loaded meanwhile; send it again"))
            return
        entry.request.open_texts(model.tokenizer)
        if self._config.request_log is not None and self._config.request_log_prompts:
            entry.prompt_token_ids = request.prompt_token_ids
        self._requests.apply(entry, Admitted(request, model.name))

    async def _admit_suspect(self, entry: LiveEntry, request: Request, model: ServedModel) -> None:
        """Waits until no other suspect is in the engine: `poison.py` says why."""
        while self._host.is_sleeping or any(other.suspect in self._suspects for other in self._requests.running()):
            if self._host.is_sleeping:
                await self._awake()
            else:
                await self._requests.wait_ended()
            if entry.request.has_ended:
                return
        try:
            self._suspects.check(entry.suspect)
        except PageddError as error:
            self.refuse([entry], error)
        else:
            self._submit(entry, request, model)

    async def _engine_request(self, entry: LiveEntry, model: ServedModel) -> Request:
        admission.check_text_length(entry.message, model.max_token_bytes, self._engine_info().max_model_len)
        token_ids = await model.prompt_token_ids(entry.message)
        extras = admission.cache_extras(entry.message, entry.caller, self._config.prefix_sharing)
        if entry.message.cache_salt is None:
            self._doctor.saw_prompt(token_ids, extras)
        info = self._engine_info()  # again, because another engine may have started meanwhile
        request = admission.to_engine_request(
            entry.message,
            entry.request.request_id,
            token_ids,
            info,
            most_output_tokens=self._metering.most_output_tokens(
                entry.meter, len(token_ids), entry.message.sampling.n, info
            ),
            eos_token_ids=model.prepared.eos_token_ids,
            cache_extras=extras,
        )
        entry.digest = poison.digest(request)
        self._suspects.check(entry.suspect)
        return request

    async def _awake(self) -> None:
        """Wakes the engine, again when it was put to sleep meanwhile. Raises `PageddError` when it cannot be had."""
        while self._host.is_sleeping:
            self._wake()
            await self._host.wait_changed()
        self._host.check_ready()

    def _engine_info(self) -> EngineInfo:
        self._host.check_ready()
        if self._host.info is None:
            raise PageddError("engine_died", "the engine process has just ended; try again shortly")
        return self._host.info


def _still_outside(entries: Sequence[LiveEntry]) -> list[LiveEntry]:
    """Those that the engine has not and that have not ended."""
    return [entry for entry in entries if entry.request.phase is Phase.ADMITTING]
