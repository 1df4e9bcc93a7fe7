"""Which letter and which hue a sequence has: given when it first holds blocks, kept until it leaves.

A number that was given back rests as long as possible, so that a letter does not pass from one to the next at once.
"""

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from pagedd.tui.glyphs import LETTERS

NUM_HUES = 12
# Numbers that fit into a byte beside the states of `pool.py`; all sequences beyond share the last.
MAX_MARKS = 240


@dataclass(frozen=True, slots=True)
class Mark:
    """`number` is 1 … `MAX_MARKS`; `letter` is None for those beyond the alphabet."""

    number: int

    @property
    def letter(self) -> str | None:
        return LETTERS[self.number - 1] if self.number <= len(LETTERS) else None

    @property
    def hue(self) -> int:
        return self.number % NUM_HUES


class Marks:
    """Gives marks out. Mutated by `follow` alone."""

    def __init__(self) -> None:
        self._marks: dict[Hashable, Mark] = {}
        self._lettered = deque(range(1, len(LETTERS) + 1))
        self._others = deque(range(len(LETTERS) + 1, MAX_MARKS))

    def follow(self, live: Iterable[Hashable], holding: Iterable[Hashable]) -> None:
        """Takes the marks of all that are not `live` any more, then gives one to each that is `holding` blocks."""
        alive = set(live)
        for key in [key for key in self._marks if key not in alive]:
            number = self._marks.pop(key).number
            if number <= len(LETTERS):
                self._lettered.append(number)
            elif number < MAX_MARKS:
                self._others.append(number)
        for key in holding:
            if key not in self._marks:
                self._marks[key] = Mark(self._next_number())

    def get(self, key: Hashable) -> Mark | None:
        return self._marks.get(key)

    def _next_number(self) -> int:
        if self._lettered:
            return self._lettered.popleft()
        return self._others.popleft() if self._others else MAX_MARKS
