"""From frames to what the screens show: rates, histories, the pool's picture, letters that stay with a sequence.

`State.take` is the only way in, and time comes in with the frames: the same frames make the same pictures, live or
replayed. Knows no socket and no widget.
"""

from collections import deque
from dataclasses import dataclass, field

from pagedd.client.protocol import Event, RequestRow, StatsFrame
from pagedd.tui.history import Rate, Series
from pagedd.tui.letters import Mark, Marks
from pagedd.tui.pool import Key, Pool
from pagedd.tui.timeline import Timeline

EVENTS_KEPT = 1000
STALE_S = 1.0
# Counters (`…_total` in a frame's figures) whose speed is shown, under the name that it is shown by.
RATES = {
    "output_tokens": "generation_tokens_total",
    "prompt_tokens": "prompt_tokens_total",
    "evictions": "evictions_total",
    "preemptions": "preemptions_total",
    "steps": "steps_total",
}
_ENERGY_WINDOW_S = 10.0
# A sequence's own speed is over longer: few tokens come in a second.
_SEQUENCE_WINDOW_S = 2.0


@dataclass(slots=True)
class Sequence:
    """One live sequence: its newest row and what follows from the rows before it. `mark` is None until it has blocks.

    `tokens_per_s` is None until two frames have it.
    """

    row: RequestRow
    mark: Mark | None = None
    tokens_per_s: float | None = None
    timeline: Timeline = field(default_factory=Timeline)
    rate: Rate = field(default_factory=lambda: Rate(_SEQUENCE_WINDOW_S))

    @property
    def key(self) -> Key:
        return self.row.request_id, self.row.index


@dataclass(frozen=True, slots=True)
class Link:
    """How the source of frames is. `error` says why it is `lost`; the next try is in `retry_s`."""

    state: str = "connecting"  # live, lost, ended (a replay that is over)
    error: str = ""
    retry_s: float | None = None


class State:
    """Everything on screen. Mutated only by `take` and `lose`.

    Attributes:
        frame: the newest one; None before the first.
        received_s: when it came, on the viewer's clock.
        rates: per second, by the names of `RATES`; None is "not known yet".
        sequences: in the daemon's order.
        events: oldest first, bounded.
        previews: the first words of requests, by request_id; whoever learns them puts them here.
    """

    def __init__(self) -> None:
        self.frame: StatsFrame | None = None
        self.received_s = 0.0
        self.link = Link()
        self.pool = Pool()
        self.sequences: list[Sequence] = []
        self.rates: dict[str, float | None] = dict.fromkeys(RATES)
        self.joules_per_token: float | None = None
        self.series: dict[str, Series] = {name: Series() for name in (*RATES, "busy", "kv_usage")}
        self.events: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self.previews: dict[str, str] = {}
        self._marks = Marks()
        self._by_key: dict[Key, Sequence] = {}
        self._counters = {name: Rate() for name in RATES}
        self._energy = Rate(_ENERGY_WINDOW_S)
        self._energy_tokens = Rate(_ENERGY_WINDOW_S)
        self._newest_event: int | None = None

    def take(self, frame: StatsFrame, now_s: float) -> None:
        """Takes in a frame that came at `now_s` on the viewer's clock."""
        if self.frame is not None and frame.uptime_s < self.frame.uptime_s:
            self._note(frame.time_s, "engine", f"another daemon answers, {frame.uptime_s:.1f} s after its start")
            self._newest_event = None
        elif self.link.state == "lost":
            self._note(frame.time_s, "engine", "connected again")
        self.frame, self.received_s, self.link = frame, now_s, Link("live")
        self._take_figures(frame)
        self._take_requests(frame)
        self._take_events(frame.events)

    def lose(self, link: Link) -> None:
        """The source is gone; what is on screen stays."""
        if self.link.state == "live" and self.frame is not None and link.state == "lost":
            self._note(self.frame.time_s, "engine", f"connection lost: {link.error}")
        self.link = link

    def age_s(self, now_s: float) -> float:
        """How old the newest frame is."""
        return max(0.0, now_s - self.received_s)

    def is_stale(self, now_s: float) -> bool:
        return self.link.state == "lost" or (self.link.state == "live" and self.age_s(now_s) > STALE_S)

    def figure(self, name: str) -> float | None:
        """A figure of the newest frame; None is "not available"."""
        return None if self.frame is None else self.frame.figures.get(name)

    def sequence(self, key: Key | None) -> Sequence | None:
        return None if key is None else self._by_key.get(key)

    def marks(self, block: int) -> list[tuple[Sequence, int]]:
        """The live sequences that hold a block, each with the block's logical index."""
        return [(self._by_key[key], logical) for key, logical in self.pool.owners(block) if key in self._by_key]

    def busy(self) -> float | None:
        """What the machine's main device is doing, 0–1: the GPU when there is one, else the CPU."""
        machine = None if self.frame is None else self.frame.machine
        if machine is not None and machine.devices:
            percent = machine.devices[0].utilization_percent
        else:
            percent = None if machine is None else machine.cpu_percent
        return None if percent is None else percent / 100

    def _take_figures(self, frame: StatsFrame) -> None:
        for name, counter in RATES.items():
            rate = self._counters[name].add(frame.time_s, frame.figures.get(counter))
            self.rates[name] = rate
            self.series[name].add(frame.time_s, rate)
        self.series["busy"].add(frame.time_s, self.busy())
        self.series["kv_usage"].add(frame.time_s, frame.figures.get("kv_usage"))
        watts = self._energy.add(frame.time_s, frame.figures.get("gpu_energy_joules"))
        tokens = self._energy_tokens.add(frame.time_s, frame.figures.get("generation_tokens_total"))
        self.joules_per_token = watts / tokens if watts is not None and tokens else None

    def _take_requests(self, frame: StatsFrame) -> None:
        by_key: dict[Key, Sequence] = {}
        for row in frame.requests:
            key = row.request_id, row.index
            sequence = self._by_key.get(key) or Sequence(row)
            sequence.row = row
            row.preview = row.preview or self.previews.get(row.request_id, "")
            sequence.tokens_per_s = sequence.rate.add(frame.time_s, row.num_output_tokens)
            sequence.timeline.take(row)
            by_key[key] = sequence
        self._by_key = by_key
        self.sequences = list(by_key.values())
        live = {request_id for request_id, _ in by_key}
        self.previews = {request_id: text for request_id, text in self.previews.items() if request_id in live}
        self._marks.follow(by_key, (key for key, sequence in by_key.items() if sequence.row.num_blocks))
        for key, sequence in by_key.items():
            sequence.mark = self._marks.get(key)
        # An engine in a long step has no map to give: the last one stays.
        if frame.blocks is not None:
            holding = {key: sequence for key, sequence in by_key.items() if sequence.row.block_table and sequence.mark}
            self.pool.take(
                frame.blocks,
                {key: sequence.row.block_table for key, sequence in holding.items()},
                {key: sequence.mark for key, sequence in holding.items() if sequence.mark is not None},
                {key: sequence.row.num_cached_tokens for key, sequence in holding.items()},
            )

    def _take_events(self, events: list[Event]) -> None:
        for event in events:
            if self._newest_event is None or event.seq > self._newest_event:
                self._newest_event = event.seq
                self.events.append(event)

    def _note(self, time_s: float, kind: str, reason: str) -> None:
        """An event that this viewer saw, not the daemon."""
        self.events.append(Event(seq=0, time_s=time_s, kind=kind, reason=reason))
