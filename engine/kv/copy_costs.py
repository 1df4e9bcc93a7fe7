"""Whether a block is cheaper to copy than to compute, by what either took lately on this machine.

Owns running averages of seconds: to save a block to host memory, to load it back, to read it from the disk, to compute
a token of a prompt. Who measures tells them; who decides asks. No torch.
"""

from dataclasses import dataclass

# How much of the past counts beside a new measurement.
_KEPT = 0.8
# A refusal makes the next try likelier, so that what was measured in a bad moment does not hold for ever.
_FADING = 0.98


@dataclass(slots=True)
class RunningAverage:
    """Seconds for one of something: `each` is None until it has been measured. `total…` are of all there ever were."""

    total: int = 0
    total_s: float = 0.0
    _count: float = 0.0
    _seconds: float = 0.0

    def note(self, count: int, seconds: float) -> None:
        self.total += count
        self.total_s += seconds
        self._count = _KEPT * self._count + count
        self._seconds = _KEPT * self._seconds + seconds

    def fade(self) -> None:
        self._seconds *= _FADING

    @property
    def each(self) -> float | None:
        return self._seconds / self._count if self._count else None


class CopyCosts:
    """The averages, and the two decisions. What was never measured is worth a try.

    Attributes:
        save, load: a block from device to host memory and back. read: a block from the disk. compute: a token.
    """

    def __init__(self, block_size: int) -> None:
        self.save = RunningAverage()
        self.load = RunningAverage()
        self.read = RunningAverage()
        self.compute = RunningAverage()
        self._block_size = block_size

    def is_worth_saving(self) -> bool:
        """A block that is saved will have to be loaded as well."""
        return self._beats_computing(self.save, self.load)

    def is_worth_loading(self, *, from_disk: bool) -> bool:
        return self._beats_computing(self.load, self.read) if from_disk else self._beats_computing(self.load)

    def _beats_computing(self, *copies: RunningAverage) -> bool:
        compute_s = self.compute.each
        if compute_s is None or sum(copy.each or 0.0 for copy in copies) <= compute_s * self._block_size:
            return True
        for copy in copies:
            copy.fade()
        return False
