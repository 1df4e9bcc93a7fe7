"""Which letter and which hue a sequence has: given when it first holds blocks, kept until it leaves.

Letters follow from the sequences' numbers (`client/letters.py`), which count up: one that was given back rests as long
as possible, and does not pass from one sequence to the next at once.
"""

from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from pagedd.client.letters import LETTERS, letter_index

NUM_HUES = 12
# Numbers that fit into a byte beside the states of `pool.py`; all sequences beyond share the last.
MAX_MARKS = 240

_Key = TypeVar("_Key", bound=Hashable)


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
        self._lettered: set[int] = set()  # indices of the letters that are given
        self._num_given = 0
        self._others = deque(range(len(LETTERS) + 1, MAX_MARKS))

    def follow(self, live: Iterable[_Key], holding: Mapping[_Key, int | None]) -> None:
        """Takes the marks of all that are not `live` any more, then gives one to each that is `holding` blocks.

        `holding` has the sequences' numbers; those without one are counted here.
        """
        alive = set(live)
        for key in [key for key in self._marks if key not in alive]:
            number = self._marks.pop(key).number
            if number <= len(LETTERS):
                self._lettered.discard(number - 1)
            elif number < MAX_MARKS:
                self._others.append(number)
        for key, number_of_sequence in holding.items():
            if key not in self._marks:
                self._marks[key] = Mark(self._mark_number(number_of_sequence))

    def get(self, key: Hashable) -> Mark | None:
        return self._marks.get(key)

    def _mark_number(self, number: int | None) -> int:
        index = letter_index(self._num_given if number is None else number, self._lettered)
        self._num_given += 1
        if index is not None:
            self._lettered.add(index)
            return index + 1
        return self._others.popleft() if self._others else MAX_MARKS
