"""Percentiles of the last minute, in bounded memory: what a person feels now, where a histogram since the start has
long forgotten how to move.

Owns the window alone. `metrics.py` feeds it; `/metrics` has the histograms of the same observations.
"""

import math
import time
from collections import deque
from collections.abc import Callable

WINDOW_S = 60.0
_SLICES = 12
# Bins grow by 4 %, so a percentile is right within 2 %.
_BINS_PER_E = 1 / math.log(1.04)
_SMALLEST_S, _LARGEST_S = 1e-4, 1e4
_NUM_BINS = math.ceil(math.log(_LARGEST_S / _SMALLEST_S) * _BINS_PER_E) + 1


class LatencyWindow:
    """Durations that were observed in the last `WINDOW_S`, give or take a twelfth of it.

    Observing is O(1); a percentile walks 470 bins.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._slice_s = WINDOW_S / _SLICES
        self._slices: deque[tuple[int, dict[int, int]]] = deque()  # number of the slice, observations by bin
        self._bins = [0] * _NUM_BINS  # sums over all slices
        self._num = 0

    def observe(self, duration_s: float, times: int = 1) -> None:
        """`times` observations of the same duration."""
        self._forget_old()
        number = int(self._clock() / self._slice_s)
        if not self._slices or self._slices[-1][0] != number:
            self._slices.append((number, {}))
        bin_ = _bin(duration_s)
        newest = self._slices[-1][1]
        newest[bin_] = newest.get(bin_, 0) + times
        self._bins[bin_] += times
        self._num += times

    def percentile(self, share: float) -> float | None:
        """The duration in s that `share` (0–1) of the observations do not exceed; None when there are none."""
        self._forget_old()
        if not self._num:
            return None
        wanted, seen = max(1, math.ceil(share * self._num)), 0
        for bin_, num in enumerate(self._bins):
            seen += num
            if seen >= wanted:
                # The middle of the bin, as its factor has it.
                return _SMALLEST_S * math.exp((bin_ + 0.5) / _BINS_PER_E)
        raise AssertionError("the bins hold fewer observations than were counted")

    def _forget_old(self) -> None:
        oldest = int(self._clock() / self._slice_s) - _SLICES
        while self._slices and self._slices[0][0] <= oldest:
            for bin_, num in self._slices.popleft()[1].items():
                self._bins[bin_] -= num
                self._num -= num


def _bin(duration_s: float) -> int:
    bounded_s = min(max(duration_s, _SMALLEST_S), _LARGEST_S)
    return int(math.log(bounded_s / _SMALLEST_S) * _BINS_PER_E)
