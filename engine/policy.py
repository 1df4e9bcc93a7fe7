"""Who goes first: one number a sequence, its virtual start time.

    due = arrival − priority × ageing_s_per_point          (the smaller, the more urgent)

A waiting request gains on everything that arrives after it, one point of priority every `ageing_s_per_point` seconds;
but between two requests that both wait the difference never changes. So ageing needs no clock and no re-sorting, and
every wait is bounded: nothing that arrives later than (100 − priority) × ageing_s_per_point seconds after a request can
be served before it.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from pagedd.engine.sequence import Sequence

MIN_PRIORITY, MAX_PRIORITY = -100, 100

Urgency = tuple[float, int]


def due_s(arrival_s: float, priority: int, ageing_s_per_point: float) -> float:
    """Virtual start time, in seconds of the clock that `arrival_s` was read from."""
    return arrival_s - priority * ageing_s_per_point


def urgency(sequence: Sequence) -> Urgency:
    """Sort key, most urgent first; ties go to the one that came first."""
    return sequence.due_s, sequence.order


class WaitingQueue:
    """Sequences without a seat, most urgent first. O(log n) to enter and leave, O(1) to remove from the middle.

    Entries of those that left or became more or less urgent go once they outnumber the others.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []
        self._waiting: dict[int, Sequence] = {}  # by order; a heap entry without its sequence here is skipped

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.order in self._waiting

    def __iter__(self) -> Iterator[Sequence]:
        """In order of entry, oldest first."""
        return iter(self._waiting.values())

    def push(self, sequence: Sequence) -> None:
        self._waiting[sequence.order] = sequence
        heappush(self._heap, (sequence.due_s, sequence.order, sequence))
        if len(self._heap) > 2 * len(self._waiting):
            self._heap = [(waiting.due_s, waiting.order, waiting) for waiting in self]
            heapify(self._heap)

    def peek(self) -> Sequence | None:
        """The most urgent one, which stays in the queue; `None` when it is empty."""
        while self._heap:
            due, order, sequence = self._heap[0]
            if self._waiting.get(order) is sequence and sequence.due_s == due:
                return sequence
            heappop(self._heap)
        return None

    def remove(self, sequence: Sequence) -> None:
        """Takes `sequence` out. Raises `KeyError` when it does not wait."""
        del self._waiting[sequence.order]
