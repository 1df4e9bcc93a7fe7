"""Turns among callers: whoever has much in flight already waits a little longer with the next.

    due = now + tokens that the caller has in flight / (weight × tokens a second that the box computes)

is when a request would begin if its caller's earlier ones had the whole box first. Its distance from now is taken off
the priority in points of `ageing_s_per_point`, since the engine's own order is arrival − priority × ageing_s_per_point
(`engine/policy.py`). So a caller with one request in flight goes before the second of another, among those with many
turns go by weight, and every wait stays bounded. Alone, a caller's requests stay in the order in which they came, and
of more urgent ones: what is less urgent does not count against them.
"""

import math
from dataclasses import dataclass, field

from pagedd.engine.policy import MIN_PRIORITY


@dataclass(slots=True)
class _Level:
    """A caller's requests of one asked-for priority. `due_s` is that of the last one that came."""

    num_tokens: int
    due_s: float


@dataclass(slots=True, eq=False)
class Turns:
    """What one caller has in flight, by the priority that was asked for: at most 201 of them."""

    _levels: dict[int, _Level] = field(default_factory=dict)

    def take(
        self,
        asked: int,
        num_tokens: int,
        *,
        weight: float,
        tokens_per_s: float | None,
        ageing_s_per_point: float,
        now_s: float,
    ) -> int:
        """The priority that the engine shall go by for a request that may come to `num_tokens`, in flight from now on.

        `tokens_per_s` is None while nothing has been measured.
        """
        level = self._levels.setdefault(asked, _Level(0, now_s))
        ahead = sum(level.num_tokens for priority, level in self._levels.items() if priority >= asked)
        wait_s = 0.0 if tokens_per_s is None else ahead / (weight * tokens_per_s)
        # Never before the caller's own last one, however much has ended meanwhile: it could take its seat.
        points = math.ceil(max(0.0, wait_s, level.due_s - now_s) / ageing_s_per_point)
        level.due_s = now_s + points * ageing_s_per_point
        level.num_tokens += num_tokens
        return max(MIN_PRIORITY, asked - points)

    def give(self, asked: int, num_tokens: int) -> None:
        """A request that took a turn ended."""
        level = self._levels[asked]
        level.num_tokens -= num_tokens
        if level.num_tokens <= 0:
            del self._levels[asked]
