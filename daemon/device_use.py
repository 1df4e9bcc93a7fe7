"""Whether the engine has the device, and with which model: sleep and wake, others who need it, another model.

Owns the order of these: what runs may end first, then the engine process goes, and nothing of it is done by halves when
whoever asked goes away. `engine_lives.py` ends and starts processes; what happens to the requests is `service.py`'s.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress

from pagedd.client.errors import PageddError
from pagedd.daemon.caller import Caller
from pagedd.daemon.config import SERVED_NAME_RULE, DaemonConfig, is_served_name
from pagedd.daemon.engine_state import EngineState
from pagedd.daemon.events import EventLog
from pagedd.daemon.host import Host
from pagedd.daemon.limits import Limit
from pagedd.daemon.live_requests import LiveRequests
from pagedd.daemon.model_loading import Candidate, FindModel
from pagedd.daemon.requests import Broken
from pagedd.daemon.served_model import ServedModel

log = logging.getLogger(__name__)

_MODEL = Limit("model", "As in the setting of that name.", max_chars=4096)


class DeviceUse:
    """One event loop.

    Args:
        served_model: what is served now; raises `PageddError` when nothing is.
        serve: makes another model's text side the one that is served.

    Attributes:
        find_model: checks and reads another model; set by `server.py`.
    """

    def __init__(
        self,
        config: DaemonConfig,
        host: Host,
        live: LiveRequests,
        events: EventLog,
        served_model: Callable[[], ServedModel],
        serve: Callable[[ServedModel], None],
    ) -> None:
        self.find_model: FindModel = _no_other_model
        self._config = config
        self._host = host
        self._live = live
        self._events = events
        self._served_model = served_model
        self._serve = serve
        self._is_loading = False  # from the first look at another model
        self._look: asyncio.Task[Candidate] | None = None  # that look, while it lasts
        self._is_swapping = False  # while the engine is replaced
        self._claims: dict[str, str] = {}  # who needs the device, and why
        self._wakes_afterwards = False
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_yielded(self) -> bool:
        """Others have the device, and no request wakes the engine."""
        return bool(self._claims)

    @property
    def _yields_because(self) -> str:
        return ", ".join(self._claims.values())

    @property
    def _is_waking(self) -> bool:
        return self._host.is_sleeping and self._host.state in (EngineState.STARTING, EngineState.LOADING)

    @property
    def state(self) -> str:
        """In one word, the engine's or `yielding`."""
        return "yielding" if self.is_yielded else self._host.state.value

    def describe(self) -> str:
        """The state in words."""
        return f"yielding: {self._yields_because}" if self.is_yielded else self._host.describe()

    def why_it_ended(self) -> Broken:
        """For a request that the engine still had when it ended as it was told."""
        if self.is_yielded:
            return Broken("device_yielded", f"it did not end before others got the device ({self._yields_because})")
        if self._is_swapping:
            return Broken("engine_loading", "it did not end before another model was loaded; send it again")
        return Broken("engine_asleep", "it did not end in time; send it again to wake the engine")

    async def close(self) -> None:
        """Gives up what is under way; returns when nothing of it goes on."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def sleep(self, by: Caller | None = None) -> None:
        """Gives the device back: running requests may end as when the daemon stops, then the engine process goes.

        `by` is the administrator who asks; None is the daemon itself.
        The next request starts it again, and waits for it. An engine that wakes just now is first let wake. Raises
        `PageddError` when there is no engine that could end.
        """
        if self._is_loading:
            raise PageddError(
                "engine_loading", "a model is being loaded; try again when it serves, or load another in its place"
            )
        if not self._host.is_sleeping:
            self._host.check_ready()
        if by is not None:
            log.info("the engine is to sleep: %s asked for it", by.name)
        await self._whole(self._sleep(None))

    async def _sleep(self, within_s: float | None) -> None:
        await self._come_to_rest(within_s)
        await self._host.sleep()

    def wake(self, by: Caller | None = None) -> None:
        """Starts the engine again when it sleeps. Raises `PageddError("device_yielded")`.

        `by` is the administrator who asks; None is a request.
        """
        self.check_not_yielded()
        if self._host.state is EngineState.ASLEEP:
            log.info("the engine wakes: %s", "a request came" if by is None else f"{by.name} asked for it")
        self._host.wake()

    async def yield_device(self, claimant: str, reason: str | None, within_s: float | None = None) -> None:
        """`claimant` needs the device, or with None does no more: the engine sleeps, and no request wakes it, while
        anybody does.

        An engine that loads just now is left to it; say it again. Raises nothing.

        Args:
            reason: why, in words; never what a caller wrote.
            within_s: most seconds for requests to end, where that is less than `drain_seconds`.
        """
        if reason is None:
            if self._claims.pop(claimant, None) is not None and not self._claims:
                self._events.add("engine", "the device is taken back")
                then = "the engine wakes" if self._wakes_afterwards else "the engine sleeps on until a request comes"
                log.info("nobody else needs the device any more: %s", then)
                if self._wakes_afterwards:
                    self._host.wake()
            return
        is_ready = self._host.state is EngineState.READY and not self._is_swapping
        if not self._claims:
            if not is_ready and self._host.state is not EngineState.ASLEEP:
                return
            # A load that is under way is given up, and the engine that it would have replaced is taken back.
            self._wakes_afterwards = is_ready and (self._is_loading or not self._host.is_sleeping)
        if is_ready:
            self._host.begin_sleep()
        if claimant not in self._claims:
            log.info("the device is left to others: %s", reason)
            self._events.add("engine", f"the device is left to others: {reason}")
        self._claims[claimant] = reason
        if is_ready:
            with suppress(PageddError):
                await self._whole(self._sleep(within_s))

    def check_not_yielded(self) -> None:
        """Raises `PageddError("device_yielded")` while others have the device."""
        if self.is_yielded:
            raise PageddError(
                "device_yielded", f"the device is left to others ({self._yields_because}); try again afterwards"
            )

    async def load_model(self, name: str, served_name: str | None, by: Caller) -> None:
        """Serves another model: looked at first, then what runs may end, and the engine is replaced.

        Requests wait meanwhile, and then have to fit the new model. Raises `PageddError` when it cannot be served; the
        one before serves on. `name` is as in the setting `model`; `served_name` None is the model's own. An earlier
        order whose model is still looked at is given up: that look may last for ever.
        """
        _MODEL.check(name)
        if served_name is not None and not is_served_name(served_name):
            said = f"served_name = {served_name[:64]!a}: {SERVED_NAME_RULE}"
            raise PageddError("invalid_value", said, field="served_name")
        if "\0" in name:
            raise PageddError("invalid_value", "model holds a zero byte, which no name does", field="model")
        self.check_not_yielded()
        if not self._host.is_sleeping:
            self._host.check_ready()
        await self._whole(self._load_model(name, served_name, by))

    async def _load_model(self, name: str, served_name: str | None, by: Caller) -> None:
        while (look := self._look) is not None:
            look.cancel()
            await asyncio.wait({look})
        if self._is_loading:
            raise PageddError("engine_loading", "another model is being loaded; try again when it serves")
        before = self._served_model()
        try:
            self._is_loading = True
            candidate = await self._find(name, served_name)
            try:
                await self._come_to_rest(None)
                self.check_not_yielded()
                self._is_swapping = True
                await self._host.swap(
                    candidate.engine, lambda: self._serve(candidate.text_side), lambda: self._serve(before)
                )
            except BaseException:
                if self._served_model() is not before:
                    self._serve(before)
                await candidate.text_side.retire()
                raise
            await before.retire()
            log.info("%s is served in place of %s, as %s asked", candidate.text_side.name, before.name, by.name)
        except PageddError as error:
            log.error("the model that %s asked for is not served, %s is: %s", by.name, before.name, error)
            self._events.add("model", f"another could not be loaded ({error.code}); {before.name} is served")
            raise
        except Exception as error:
            log.exception("fault while another model was loaded")
            raise PageddError("internal", f"{before.name} is served on; the log has the trace") from error
        finally:
            self._is_loading = self._is_swapping = False

    async def _find(self, name: str, served_name: str | None) -> Candidate:
        """Looks at the model, until it is found or another is asked for. Raises `PageddError`."""
        look = asyncio.ensure_future(self.find_model(name, served_name))
        look.add_done_callback(self._look_ended)
        self._look = look
        try:
            await asyncio.wait({look})
        except asyncio.CancelledError:
            look.cancel()
            await asyncio.wait({look})
            raise
        if look.cancelled():
            raise PageddError("engine_loading", "another model was asked for meanwhile, and is loaded in its place")
        return look.result()

    def _look_ended(self, look: "asyncio.Task[Candidate]") -> None:
        self._look = None

    async def _come_to_rest(self, within_s: float | None) -> None:
        """Nobody gets in any more, and what ran has ended, or had `drain_seconds` or fewer to do so.

        What waited for an engine that wakes just now has gone into it by then, and has its time like all others. Raises
        `PageddError` when there is no engine that could be put to sleep.
        """
        while True:
            while self._is_waking:
                await self._host.wait_changed()
            if self._host.state is EngineState.ASLEEP:
                return
            if not self._host.is_sleeping:
                self._host.begin_sleep()
            await self._running_ended(within_s)
            if self._host.is_sleeping and not self._is_waking:
                return

    async def _running_ended(self, within_s: float | None = None) -> None:
        """Returns when the engine has no request any more, or `drain_seconds` or fewer are over."""
        limit_s = self._config.drain_seconds
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s if within_s is None else min(limit_s, within_s)):
                while self._live.running():
                    await self._live.wait_ended()

    async def _whole(self, work: Coroutine[None, None, None]) -> None:
        """Runs to its end, also when whoever asked for it goes away in the middle."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.shield(task)


async def _no_other_model(name: str, served_name: str | None) -> Candidate:
    raise PageddError("model_unavailable", f"{name}: this daemon serves one model alone")
