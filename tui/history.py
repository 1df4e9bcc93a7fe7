"""What was, bounded: one value a second for graphs, and the speed of a counter.

Time is the daemon's (`StatsFrame.uptime_s`), so that a replay at any speed draws the same curves.
"""

from collections import deque
from collections.abc import Sequence

SECONDS_KEPT = 600
RATE_WINDOW_S = 1.0


class Series:
    """The mean of each of the last `SECONDS_KEPT` seconds; a second without a value is None."""

    def __init__(self) -> None:
        self._means: deque[float | None] = deque(maxlen=SECONDS_KEPT)
        self._second: int | None = None
        self._sum = 0.0
        self._num = 0

    def add(self, time_s: float, value: float | None) -> None:
        """Takes in a value. Time that went back starts afresh."""
        second = int(time_s)
        if self._second is not None and second < self._second:
            self._means.clear()
            self._second = None
        if self._second is None or second > self._second:
            missed = 0 if self._second is None else min(SECONDS_KEPT, second - self._second - 1)
            self._means.extend([None] * missed)
            self._means.append(None)
            self._second, self._sum, self._num = second, 0.0, 0
        if value is not None:
            self._sum += value
            self._num += 1
            self._means[-1] = self._sum / self._num

    def last(self, num_seconds: int) -> Sequence[float | None]:
        """The newest values, oldest first, at most `num_seconds` of them."""
        return list(self._means)[-num_seconds:] if num_seconds > 0 else []

    def maximum(self, num_seconds: int) -> float:
        return max((value for value in self.last(num_seconds) if value is not None), default=0.0)


class Rate:
    """How fast a counter grows, per second, over the last `window_s`."""

    def __init__(self, window_s: float = RATE_WINDOW_S) -> None:
        self._window_s = window_s
        self._readings: deque[tuple[float, float]] = deque()

    def add(self, time_s: float, total: float | None) -> float | None:
        """The rate with this reading in it; None until there are two. A counter that shrank was restarted."""
        if total is None:
            self._readings.clear()
            return None
        readings = self._readings
        if readings and (total < readings[-1][1] or time_s < readings[-1][0]):
            readings.clear()
        readings.append((time_s, total))
        # The newest reading that is old enough stays, as the start of the window.
        while len(readings) > 2 and readings[1][0] <= time_s - self._window_s:
            readings.popleft()
        first_s, first = readings[0]
        return (total - first) / (time_s - first_s) if time_s > first_s else None
