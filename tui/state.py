"""From frames to what the screens show: rates, histories, the pool's picture, letters that stay with a sequence.

`State.take` is the only way in, and time comes in with the frames: the same frames make the same pictures, live or
replayed. Knows no socket and no widget.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from pagedd.client.stats_frame import Ending, Event, RequestRow, StatsFrame
from pagedd.tui.history import Rate, Series
from pagedd.tui.letters import Mark, Marks
from pagedd.tui.pool import OWNED, Key, Pool
from pagedd.tui.timeline import Timeline

EVENTS_KEPT = 1000
ENDINGS_KEPT = 1000
# Overdue by that, a picture says its age.
STALE_S = 0.75
# Overdue by that, it does not look alive any more. Longer than the daemon waits for an engine in a long step.
GREY_S = 4.0
# Counters (`…_total` in a frame's figures) whose speed is shown, under the name that it is shown by.
RATES = {
    "output_tokens": "generation_tokens_total",
    "prompt_tokens": "prompt_tokens_total",
    "evictions": "evictions_total",
    "preemptions": "preemptions_total",
    "steps": "steps_total",
}
# The number of an event that this viewer saw; a daemon's begin at 1.
NOTE = 0
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
    """How the source of frames is. `error` says why it is `lost`, or `ended` too early; the next try is in
    `retry_s`.
    """

    state: str = "connecting"  # live, lost, ended (a replay that is over)
    error: str = ""
    retry_s: float | None = None


class State:
    """Everything on screen. Mutated only by `take`, `lose` and `regain`.

    Attributes:
        frame: the newest one; None before the first.
        received_s: when it came, on the viewer's clock.
        rates: per second, by the names of `RATES`; None is "not known yet".
        sequences: in the daemon's order.
        is_held: no engine answers for longer than usual; blocks and sequences are those of an earlier frame.
        events: by their time, oldest first, bounded.
        endings: how requests ended, by request_id; bounded.
        previews: the first words of requests, by request_id; whoever learns them puts them here.
    """

    def __init__(self) -> None:
        self.frame: StatsFrame | None = None
        self.received_s = 0.0
        self.link = Link()
        self.pool = Pool()
        self.sequences: list[Sequence] = []
        self.rates: dict[str, float | None] = dict.fromkeys(RATES)
        self.is_held = False
        self.series: dict[str, Series] = {name: Series() for name in (*RATES, "busy", "kv_usage")}
        self.events: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self.endings: OrderedDict[str, Ending] = OrderedDict()
        self.previews: dict[str, str] = {}
        # Unix time as it would be, had nobody set the clock since the first frame. Another daemon continues it.
        self._steady_s = 0.0
        self._marks = Marks()
        self._by_key: dict[Key, Sequence] = {}
        self._counters = {name: Rate() for name in RATES}
        # The last frame's, by what no two events have in common: a daemon numbers its own from 1.
        self._seen_events: set[tuple[int, float]] = set()

    def take(self, frame: StatsFrame, now_s: float) -> None:
        """Takes in a frame that came at `now_s` on the viewer's clock."""
        before = self.frame
        is_another = before is not None and (frame.uptime_s < before.uptime_s or frame.seq < before.seq)
        if before is None:
            self._steady_s = frame.time_s
        else:
            self._steady_s += frame.uptime_s - (0.0 if is_another else before.uptime_s)
        if is_another:
            self._note(frame.time_s, "engine", f"another daemon answers, {frame.uptime_s:.1f} s after its start")
        elif self.link.state == "lost":
            self._note(frame.time_s, "engine", "connected again")
        self.frame, self.received_s, self.link = frame, now_s, Link("live")
        self._take_figures(frame)
        self.endings.update((ending.request_id, ending) for ending in frame.endings)
        while len(self.endings) > ENDINGS_KEPT:
            self.endings.popitem(last=False)
        # An engine in a long step has no map to give: what it had stays. One that is gone has nothing any more.
        self.is_held = frame.blocks is None and not frame.requests and frame.state == "ready" and not is_another
        if not self.is_held:
            self._take_requests(frame)
        self._take_events(frame.events)

    def fill_in_previews(self, frame: StatsFrame) -> None:
        """Puts the first words that are known into the frame's rows."""
        live = {row.request_id for row in frame.requests}
        self.previews = {request_id: text for request_id, text in self.previews.items() if request_id in live}
        for row in frame.requests:
            row.preview = row.preview or self.previews.get(row.request_id, "")

    def lose(self, link: Link) -> None:
        """The source is gone; what is on screen stays."""
        if self.link.state == "live" and self.frame is not None and link.state == "lost":
            self._note(self.frame.time_s, "engine", f"connection lost: {link.error}")
        self.link = link

    def regain(self) -> None:
        """The source is there again; what is on screen stays as old as it is."""
        self.link = Link("live")

    def age_s(self, now_s: float) -> float:
        """How old the newest frame is."""
        return max(0.0, now_s - self.received_s)

    def overdue_s(self, now_s: float) -> float:
        """For how long the frame after the newest one should have been here; 0 while there is time."""
        interval_s = 0.0 if self.frame is None else self.frame.interval_s
        return max(0.0, self.age_s(now_s) - interval_s)

    def fresh_for_s(self, now_s: float) -> float:
        """For how long nothing has to be said of the newest frame's age, if no other comes; 0 when it has to."""
        if self.frame is None or self.link.state != "live":
            return 0.0
        return max(0.0, self.frame.interval_s + STALE_S - self.age_s(now_s))

    def is_stale(self, now_s: float) -> bool:
        """What is on screen is too old to be shown as if it were alive."""
        is_late = self.link.state == "live" and self.overdue_s(now_s) > GREY_S
        return self.link.state == "lost" or is_late or self.is_held

    def figure(self, name: str) -> float | None:
        """A figure of the newest frame; None is "not available"."""
        return None if self.frame is None else self.frame.figures.get(name)

    def sequence(self, key: Key | None) -> Sequence | None:
        return None if key is None else self._by_key.get(key)

    def marks(self, block: int) -> list[tuple[Sequence, int]]:
        """The live sequences that hold a block, each with the block's logical index."""
        return [(self._by_key[key], logical) for key, logical in self.pool.owners(block) if key in self._by_key]

    def holders(self, blocks: range) -> list[tuple[Sequence, int]]:
        """The live sequences that alone hold blocks of a run, each with how many of them, the most first."""
        looks = self.pool.looks[blocks.start : blocks.stop]
        by_look = {OWNED + sequence.mark.number: sequence for sequence in self.sequences if sequence.mark is not None}
        counts = [(by_look[look], looks.count(look)) for look in set(looks) if look in by_look]
        return sorted(counts, key=lambda held: (-held[1], held[0].key))

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
            rate = self._counters[name].add(self._steady_s, frame.figures.get(counter))
            self.rates[name] = rate
            self.series[name].add(self._steady_s, rate)
        self.series["busy"].add(self._steady_s, self.busy())
        self.series["kv_usage"].add(self._steady_s, frame.figures.get("kv_usage"))

    def _take_requests(self, frame: StatsFrame) -> None:
        by_key: dict[Key, Sequence] = {}
        for row in frame.requests:
            key = row.request_id, row.index
            sequence = self._by_key.get(key) or Sequence(row)
            sequence.row = row
            sequence.tokens_per_s = sequence.rate.add(self._steady_s, row.num_output_tokens)
            sequence.timeline.take(row)
            by_key[key] = sequence
        self._by_key = by_key
        self.sequences = list(by_key.values())
        numbers = {key: sequence.row.number for key, sequence in by_key.items() if sequence.row.num_blocks}
        self._marks.follow(by_key, numbers)
        for key, sequence in by_key.items():
            sequence.mark = self._marks.get(key)
        if frame.blocks is None:
            self.pool = Pool()
        else:
            holding = {key: sequence for key, sequence in by_key.items() if sequence.row.block_table and sequence.mark}
            self.pool.take(
                frame.blocks,
                {key: sequence.row.block_table for key, sequence in holding.items()},
                {key: sequence.mark for key, sequence in holding.items() if sequence.mark is not None},
                {key: sequence.row.num_cached_tokens for key, sequence in holding.items()},
            )

    def _take_events(self, events: list[Event]) -> None:
        for event in events:
            if (event.seq, event.time_s) not in self._seen_events:
                self._add_event(event)
        if events:
            self._seen_events = {(event.seq, event.time_s) for event in events}

    def _add_event(self, event: Event) -> None:
        """In front of this viewer's own notes of later, which a daemon knows nothing of."""
        later: list[Event] = []
        while self.events and self.events[-1].seq == NOTE and self.events[-1].time_s > event.time_s:
            later.append(self.events.pop())
        self.events += [event, *reversed(later)]

    def _note(self, time_s: float, kind: str, reason: str) -> None:
        """An event that this viewer saw, not the daemon."""
        self.events.append(Event(seq=NOTE, time_s=time_s, kind=kind, reason=reason))
