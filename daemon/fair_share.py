"""Turns among callers: whoever has much in flight already waits a little longer with the next.

    due = now + tokens that the caller has in flight / (weight × tokens a second that the box computes)

is when a request would begin if its caller's earlier ones had the whole box first. Its distance from now is taken off
the priority in points of `ageing_s_per_point`, since the engine's own order is arrival − priority × ageing_s_per_point
(`engine/policy.py`). So a caller with one request in flight goes before the second of another, among those with many
turns go by weight, and every wait stays bounded. Alone, a caller's requests stay in the order in which they came.
"""

import math
from dataclasses import dataclass

from pagedd.engine.policy import MIN_PRIORITY


@dataclass(slots=True, eq=False)
class Turns:
    """One caller's last `due_s`, of the clock that `priority` is given. Mutated only by `priority`."""

    due_s: float = -math.inf

    def priority(
        self,
        asked: int,
        *,
        num_tokens_in_flight: int,
        weight: float,
        tokens_per_s: float | None,
        ageing_s_per_point: float,
        now_s: float,
    ) -> int:
        """The priority that the engine shall go by. `tokens_per_s` is None while nothing has been measured."""
        if num_tokens_in_flight == 0 or tokens_per_s is None:
            self.due_s = now_s
            return asked
        # Never before the caller's own last one, however much has ended meanwhile: it could take its seat.
        due_s = max(self.due_s, now_s + num_tokens_in_flight / (weight * tokens_per_s))
        points = math.ceil((due_s - now_s) / ageing_s_per_point)
        self.due_s = now_s + points * ageing_s_per_point
        return max(MIN_PRIORITY, asked - points)
