"""Totals since the engine started, as the scheduler counts them; `stats.py` defines them in words."""

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerCounters:
    """Each never falls."""

    steps: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    recomputed_tokens: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
