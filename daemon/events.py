"""What happened lately and why, for people who watch: the last 256 events, each with its reason.

Owns the log and the making of one event out of a burst of evictions. Reasons hold names and numbers of the daemon's
own, never what a caller wrote: everybody who may read the statistics reads them. For the whole story see the log.
"""

import math
import time
from collections import deque
from collections.abc import Callable

from pagedd.client.errors import ERROR_KINDS
from pagedd.client.stats_frame import Event
from pagedd.daemon.engine_state import EngineState
from pagedd.daemon.wall_clock import unix_s
from pagedd.engine.info import EngineInfo
from pagedd.engine.request import Preemption

EVENTS_KEPT = 256
# A burst of evictions ends when none has come for so long, and is told in parts when it goes on.
BURST_GAP_S = 1.0
MAX_BURST_S = 10.0
# A caller that asks for the same impossible thing in a loop must not push everything else out.
_REPEAT_S = 1.0
# The messages of these are the daemon's own sentences around numbers; others may quote a field.
_TELLING = frozenset(
    {
        "queue_full",
        "prompt_too_long",
        "exceeds_kv_pool",
        "over_quota",
        "exceeds_quota",
        "client_too_slow",
        "engine_died",
        "engine_failed",
        "engine_stalled",
        "engine_asleep",
        "device_yielded",
        "engine_loading",
        "shutting_down",
        "out_of_memory",
        "nan_logits",
    }
)


class EventLog:
    """The newest events. One event loop adds and reads.

    Args:
        clock: seconds, monotonic; replaceable so that tests decide what time it is.
        to_unix_s: what an event shows for a time of `clock`.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, to_unix_s: Callable[[float], float] = unix_s
    ) -> None:
        self._clock = clock
        self._to_unix_s = to_unix_s
        self._events: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self._seq = 0
        self._evictions_seen = 0
        self._burst: _Burst | None = None
        self._refused_s: dict[tuple[str, str | None], float] = {}  # when each was last told
        self._engine_state: EngineState | None = None

    def add(self, kind: str, reason: str, request_id: str = "") -> None:
        """`kind` is one of those that `Event` lists."""
        self._add(self._clock(), kind, reason, request_id)

    def refused(self, code: str, message: str, request_id: str = "", field: str | None = None) -> None:
        """A message was refused, or a request broke. The same code and field again within a second is not told.

        `field` is a name of the schema, which no caller made up.
        """
        known = ERROR_KINDS.get(code)
        meaning = message if code in _TELLING or known is None else known.meaning
        reason, now_s = f"{code} ({field}): {meaning}" if field else f"{code}: {meaning}", self._clock()
        if now_s - self._refused_s.get((code, field), -math.inf) >= _REPEAT_S:
            self._refused_s[code, field] = now_s
            self.add("refusal", reason, request_id)

    def preempted(self, preemptions: list[Preemption]) -> None:
        """What `EngineHost.on_preempted` tells."""
        for victim in preemptions:
            what = "its seat" if victim.for_what == "seat" else "its blocks"
            self.add("preemption", f"request {victim.by_request_id} needed {what}", victim.request_id)

    def engine_is(self, state: EngineState, detail: str, info: EngineInfo | None) -> None:
        """The engine's state as it is now; progress within one is no event."""
        if state is self._engine_state:
            return
        self._engine_state = state
        if state is EngineState.READY and info is not None:
            self.add("engine", f"ready: {info.num_blocks} blocks of {info.block_size} tokens on {info.device_name}")
        elif state is EngineState.RESTARTING:
            self.add("engine", f"{detail}; another is started")
        elif state is EngineState.ASLEEP:
            self.add("engine", f"sleeps: {detail}")
        elif state is EngineState.STALLED:
            self.add("engine", f"stalled: {detail}")
        elif state is EngineState.FAILED:
            self.add("engine", f"failed: {detail}")

    def saw_evictions(self, evictions_total: int) -> None:
        """The engine's counter as it is now; it begins anew with each engine."""
        new = evictions_total - self._evictions_seen if evictions_total >= self._evictions_seen else evictions_total
        self._evictions_seen = evictions_total
        self._end_burst_if_over()
        if new:
            now_s = self._clock()
            self._burst = self._burst or _Burst(now_s)
            self._burst.num_blocks += new
            self._burst.last_s = now_s

    def newest(self, limit: int = EVENTS_KEPT) -> list[Event]:
        """At most `limit` events, oldest first."""
        self._end_burst_if_over()
        return list(self._events)[-limit:]

    def _end_burst_if_over(self) -> None:
        burst, now_s = self._burst, self._clock()
        if burst is None or (now_s - burst.last_s < BURST_GAP_S and now_s - burst.first_s < MAX_BURST_S):
            return
        self._burst = None
        blocks = "1 cached block was" if burst.num_blocks == 1 else f"{burst.num_blocks} cached blocks were"
        self._add(
            burst.last_s, "eviction", f"{blocks} taken for new tokens within {burst.last_s - burst.first_s:.1f} s"
        )

    def _add(self, at_s: float, kind: str, reason: str, request_id: str = "") -> None:
        self._seq += 1
        time_s = self._to_unix_s(at_s)
        self._events.append(Event(seq=self._seq, time_s=time_s, kind=kind, reason=reason, request_id=request_id))


class _Burst:
    def __init__(self, now_s: float) -> None:
        self.first_s = self.last_s = now_s
        self.num_blocks = 0
