"""What a sequence has been through, as far as frames told: waiting, prefill, decode, preempted, and for how long."""

from dataclasses import dataclass, field

from pagedd.client.stats_frame import RequestRow

UNSEEN = "unseen"  # before the first frame that had it
# A sequence that is preempted again and again keeps the newest of its phases.
_MAX_PHASES = 256


@dataclass(slots=True)
class Phase:
    """A sequence was in `state` from `start_s` to `end_s`, seconds of its age; in prefill after `num_chunks` chunks."""

    state: str
    start_s: float
    end_s: float
    num_chunks: int = 0

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(slots=True)
class Timeline:
    """The phases of one sequence without gaps, oldest first. Mutated only by `take`."""

    phases: list[Phase] = field(default_factory=list)
    _num_computed_tokens: int = 0

    def take(self, row: RequestRow) -> None:
        if not self.phases:
            self._begin(row)
        newest = self.phases[-1]
        if newest.state == row.state:
            newest.end_s = row.age_s
        else:
            self.phases.append(Phase(row.state, newest.end_s, row.age_s))
            newest = self.phases[-1]
            del self.phases[:-_MAX_PHASES]
        if row.num_computed_tokens != self._num_computed_tokens:
            newest.num_chunks += 1
            self._num_computed_tokens = row.num_computed_tokens

    def seconds(self, state: str) -> float:
        return sum(phase.seconds for phase in self.phases if phase.state == state)

    def num_chunks(self) -> int:
        return sum(phase.num_chunks for phase in self.phases if phase.state == "prefill")

    def _begin(self, row: RequestRow) -> None:
        """What must have been before the first frame: a waiting one has only waited, a first token ended a prefill."""
        if row.state == "waiting" or row.age_s <= 0:
            self.phases.append(Phase(row.state, 0.0, row.age_s))
            return
        start_s = row.first_token_s if row.state == "decode" and row.first_token_s is not None else row.age_s
        self.phases.append(Phase(UNSEEN, 0.0, start_s))
