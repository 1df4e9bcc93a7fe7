"""How fast the engine may compute: the time that a step's tokens are worth passes before the next one.

Owns the arithmetic and its clock. Who says how fast is `power.py`, who waits is `engine_process.py`.
"""

import time
from collections.abc import Callable


class Pace:
    """A step is paid for afterwards, so that one of any size can be made. Unused time is not saved up.

    Attributes:
        tokens_per_second: prompt and output together; None is as fast as it goes.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.tokens_per_second: float | None = None
        self._clock = clock
        self._due_s = 0.0
        self._begun_s = clock()

    def begin_step(self) -> None:
        self._begun_s = self._clock()

    def end_step(self, num_tokens: int) -> None:
        """The step that began computed so many."""
        if self.tokens_per_second is not None:
            self._due_s = self._begun_s + num_tokens / self.tokens_per_second

    @property
    def wait_s(self) -> float:
        """Until the next step may begin."""
        return 0.0 if self.tokens_per_second is None else max(0.0, self._due_s - self._clock())
