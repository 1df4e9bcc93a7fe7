"""Whether a block is cheaper to copy than to compute, by what either took lately on this machine.

Owns running averages of seconds: to save a block to host memory, to load it back, to read it from the disk, to compute
a token of a prompt. Who measures tells them; who decides asks, once for all that is wanted together. No torch.
"""

import math
from dataclasses import dataclass

# How much of the past counts beside a new measurement.
_KEPT = 0.8
# A refusal makes the next try likelier, so that what was measured in a bad moment does not hold for ever. A try is one
# block, and what it takes counts alone.
_FADING = 0.98


@dataclass(slots=True)
class RunningAverage:
    """Seconds for one of something: `each` is None until it has been measured. `total…` are of all there ever were.

    `has_faded`: it says less than was measured, and has to be measured again before it is relied on.
    """

    total: int = 0
    total_s: float = 0.0
    has_faded: bool = False
    _count: float = 0.0
    _seconds: float = 0.0

    def note(self, count: int, seconds: float) -> None:
        self.total += count
        self.total_s += seconds
        kept = 0.0 if self.has_faded else _KEPT
        self._count = kept * self._count + count
        self._seconds = kept * self._seconds + seconds
        self.has_faded = False

    def fade(self) -> None:
        self.has_faded = True
        self._seconds *= _FADING

    @property
    def each(self) -> float | None:
        return self._seconds / self._count if self._count else None


class CopyCosts:
    """The averages, and the two decisions: how many blocks to copy, of any number. What was never measured is copied.

    Attributes:
        save, load: a block from device to host memory and back. read: a block from the disk. compute: a token.
    """

    def __init__(self, block_size: int) -> None:
        self.save = RunningAverage()
        self.load = RunningAverage()
        self.read = RunningAverage()
        self.compute = RunningAverage()
        self.block_size = block_size

    def max_saves(self) -> float:
        """A block that is saved will have to be loaded as well."""
        return self._max_copies(self.save, self.load)

    def max_loads(self, *, from_disk: bool) -> float:
        return self._max_copies(self.load, self.read) if from_disk else self._max_copies(self.load)

    def _max_copies(self, *averages: RunningAverage) -> float:
        """None where computing is quicker, one where that has to be measured anew, else as many as are wanted."""
        compute_s = self.compute.each
        if compute_s is not None and sum(each.each or 0.0 for each in averages) > compute_s * self.block_size:
            for average in averages:
                average.fade()
            return 0
        return 1 if any(average.has_faded for average in averages) else math.inf
