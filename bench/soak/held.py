"""What a daemon's processes hold while nothing is asked of them, to be compared before and after."""

from contextlib import suppress
from dataclasses import dataclass

import psutil

# What allocators keep, and a thread pool that has grown to its bound.
MEMORY_SLACK_BYTES = 48 << 20
THREADS_SLACK = 32


@dataclass(frozen=True, slots=True)
class Held:
    """By the front and its engine."""

    rss_bytes: int
    num_descriptors: int
    num_threads: int
    num_children: int
    engine_rss_bytes: int
    engine_descriptors: int
    engine_threads: int

    @classmethod
    def by(cls, pid: int) -> "Held":
        """Raises `RuntimeError` when there is no engine process, `psutil.NoSuchProcess` when there is no front."""
        front, engine = psutil.Process(pid), engine_of(pid)
        if engine is None:
            raise RuntimeError("there is no engine process")
        return cls(
            front.memory_info().rss,
            front.num_fds(),
            front.num_threads(),
            len(front.children(recursive=True)),
            engine.memory_info().rss,
            engine.num_fds(),
            engine.num_threads(),
        )

    def grown_beyond(self, before: "Held") -> list[str]:
        """What is held now and was not before, in sentences."""
        grown = []
        for name, slack in (
            ("rss_bytes", MEMORY_SLACK_BYTES),
            ("num_descriptors", 0),
            ("num_threads", THREADS_SLACK),
            ("num_children", 0),
            ("engine_rss_bytes", MEMORY_SLACK_BYTES),
            ("engine_descriptors", 0),
            ("engine_threads", 0),
        ):
            now, then = getattr(self, name), getattr(before, name)
            if now > then + slack:
                grown.append(f"{name}: {then} before, {now} after, {slack} allowed")
        return grown


def engine_of(pid: int) -> psutil.Process | None:
    """The engine process of the front `pid`; None while there is none."""
    for child in psutil.Process(pid).children():
        with suppress(psutil.Error):
            if any("engine_process" in word for word in child.cmdline()):
                return child
    return None
