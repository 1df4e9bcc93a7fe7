"""What a soak has seen: how requests ended, which faults were injected, and what should not have happened.

Owns the rule that each request has exactly one end. Knows no socket.
"""

from collections import Counter

from pagedd.client.errors import ERROR_KINDS

# How a request that is right may end while engines die, sleep and hang.
_EXPECTED_CODES = frozenset({"engine_died", "engine_loading", "engine_stalled", "engine_asleep", "queue_full"})
# How a slow one may end besides.
_SLOW_CODES = frozenset({"client_too_slow"})


class Ledger:
    """Shared by all clients of a soak.

    Attributes:
        ends: by finish reason or code.
        faults_injected: by name.
        wrong: sentences about what should not have happened; empty in a soak that is passed.
    """

    def __init__(self) -> None:
        self.ends: Counter[str] = Counter()
        self.faults_injected: Counter[str] = Counter()
        self.wrong: list[str] = []

    def finished(self, reason: str) -> None:
        """A request was served to its end."""
        self.ends[reason] += 1

    def failed(self, code: str, message: str, *, is_slow: bool = False) -> None:
        """A request that was right was refused, or broke."""
        self.ends[code] += 1
        if code not in _EXPECTED_CODES | (_SLOW_CODES if is_slow else frozenset()):
            self.wrong.append(f"a request ended with {code}: {message}")

    def refused(self, status: int, code: str) -> None:
        """A request that was wrong was refused; `status` is HTTP's, or 400 where there is none."""
        self.ends["refused"] += 1
        if not 400 <= status < 600 or code not in ERROR_KINDS or code == "internal":
            self.wrong.append(f"bad input was answered with {status} and {code!r}")


class Ends:
    """What one connection waits for: the ends of its requests, by the client's id, and the refusals of bad ones."""

    def __init__(self, ledger: Ledger) -> None:
        self.waiting: set[str] = set()
        self._ledger = ledger
        self._accepted: set[str] = set()
        self._num_bad = 0

    @property
    def is_open(self) -> bool:
        return bool(self.waiting) or self._num_bad > 0

    @property
    def missing(self) -> str:
        return ", ".join([*sorted(self.waiting), *["a bad one"] * self._num_bad])

    def sent(self, request_id: str) -> None:
        self.waiting.add(request_id)

    def sent_bad(self) -> None:
        self._num_bad += 1

    def accepted(self, request_id: str) -> None:
        if request_id not in self.waiting or request_id in self._accepted:
            self._ledger.wrong.append(f"{request_id} was accepted twice, or after its end")
        self._accepted.add(request_id)

    def heard(self, request_id: str) -> None:
        if request_id not in self.waiting:
            self._ledger.wrong.append(f"{request_id} produced text after its end")

    def ended(self, request_id: str) -> None:
        if request_id not in self.waiting:
            self._ledger.wrong.append(f"{request_id} ended twice")
        self.waiting.discard(request_id)

    def refused_bad(self) -> None:
        if self._num_bad == 0:
            self._ledger.wrong.append("a bad request was refused twice")
        self._num_bad = max(0, self._num_bad - 1)

    def left(self) -> None:
        """The connection was closed: nothing more can be heard."""
        self._ledger.ends["left"] += len(self.waiting)
        self.waiting.clear()
