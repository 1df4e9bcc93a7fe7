"""Looks at the daemon once a second and keeps what `advice.py` judges by: the last minutes in which there was work.

Owns the samples and their sums. Knows no rule.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pagedd.client.stats_frame import Advice
from pagedd.daemon.accounts import Accounts
from pagedd.daemon.advice import Window, advise
from pagedd.daemon.prefix_repeats import PrefixCounts, PrefixRepeats
from pagedd.engine.info import EngineInfo
from pagedd.engine.request import Preemption
from pagedd.engine.stats import EngineStats

# Samples are a second apart while there is work; older ones than this say nothing about now.
MAX_SAMPLES = 120
MAX_AGE_S = 600.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One moment with work. Counters are since the engine or the daemon started."""

    time_s: float
    stats: EngineStats
    prefixes: PrefixCounts
    num_preemptions: int
    top_caller: str
    top_caller_tokens: int
    is_paced: bool


class Doctor:
    """One event loop; every method runs in it.

    Args:
        clock: seconds, monotonic; replaceable so that tests decide what time it is.

    Attributes:
        is_paced: the engine computes slowly because it has been told to, so that requests wait whatever is changed.
    """

    def __init__(
        self, accounts: Accounts, *, caches_prefixes: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.is_paced = False
        self._accounts = accounts
        self._caches_prefixes = caches_prefixes
        self._clock = clock
        self._repeats = PrefixRepeats()
        self._num_preemptions = 0
        self._samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)
        self._prefixes_before = PrefixCounts()

    def saw_prompt(self, token_ids: Sequence[int], scope: object) -> None:
        """See `PrefixRepeats.saw`."""
        self._repeats.saw(token_ids, scope)

    def preempted(self, preemptions: Sequence[Preemption]) -> None:
        """Seats that went to a more urgent request are no sign of illness."""
        self._num_preemptions += sum(victim.for_what == "blocks" for victim in preemptions)

    def look(self, stats: EngineStats | None) -> None:
        """Once a second: the engine as it is, None when there is none."""
        now_s = self._clock()
        if stats is None or (self._samples and stats.steps_total < self._samples[-1].stats.steps_total):
            # Another engine, maybe with other settings.
            self._samples.clear()
            self._prefixes_before = self._prefixes_now()
        while self._samples and now_s - self._samples[0].time_s > MAX_AGE_S:
            self._forget_oldest()
        if stats is None or not stats.num_requests_running + stats.num_requests_waiting:
            return
        if len(self._samples) == MAX_SAMPLES:
            self._forget_oldest()
        caller, num_tokens = self._top_caller()
        self._samples.append(
            Sample(now_s, stats, self._prefixes_now(), self._num_preemptions, caller, num_tokens, self.is_paced)
        )

    def advice(self, info: EngineInfo | None) -> list[Advice]:
        """What should be changed now, most worth first."""
        return [] if info is None else advise(self.window(info))

    @property
    def observed_s(self) -> float:
        """Seconds of work that the averages are over."""
        return float(len(self._samples))

    def window(self, info: EngineInfo) -> Window:
        samples = list(self._samples)
        waiting = [sample for sample in samples if sample.stats.num_requests_wanting_room and not sample.is_paced]
        used = [sample.stats for sample in samples if sample.stats.num_blocks_used]
        beside = [sample for sample in samples if sample.top_caller]
        top = Counter(sample.top_caller for sample in beside).most_common(1)
        name = top[0][0] if top else ""
        held = [sample.top_caller_tokens for sample in beside if sample.top_caller == name]
        pool_tokens = info.num_blocks * info.block_size
        prompts, before = self._repeats.counts, self._prefixes_before
        num_tokens = prompts.num_tokens - before.num_tokens
        num_computed, num_recomputed, num_preemptions = _differences(samples)
        return Window(
            block_size=info.block_size,
            max_num_seqs=info.max_num_seqs,
            max_num_batched_tokens=info.max_num_batched_tokens,
            kv_cache_dtype=info.kv_cache_dtype,
            caches_prefixes=self._caches_prefixes,
            is_cpu=info.device == "cpu",
            kv_quality=info.kv_quality,
            busy_s=float(len(samples)),
            kv_usage=_mean([sample.stats.kv_usage for sample in samples]),
            fragmentation=_mean([stats.fragmentation or 0.0 for stats in used]) if used else None,
            waiting_ratio=len(waiting) / len(samples) if samples else 0.0,
            kv_usage_waiting=_mean([sample.stats.kv_usage for sample in waiting]),
            occupancy_waiting=_mean([_occupancy(sample.stats) for sample in waiting]),
            preemptions_per_minute=60 * num_preemptions / len(samples) if samples else 0.0,
            recomputed_ratio=num_recomputed / num_computed if num_computed else 0.0,
            num_prompts=prompts.num_prompts - before.num_prompts,
            repeated_ratio=(prompts.num_repeated_tokens - before.num_repeated_tokens) / num_tokens if num_tokens else 0,
            apart_ratio=(prompts.num_apart_tokens - before.num_apart_tokens) / num_tokens if num_tokens else 0,
            top_caller=name,
            top_caller_share=sum(held) / len(samples) / pool_tokens if samples else 0.0,
        )

    def _prefixes_now(self) -> PrefixCounts:
        return replace(self._repeats.counts)

    def _forget_oldest(self) -> None:
        self._prefixes_before = self._samples.popleft().prefixes

    def _top_caller(self) -> tuple[str, int]:
        """Who holds most tokens, and how many, where there is somebody beside it; no name where there is not."""
        holders = [account for account in self._accounts if account.allowance.num_choices]
        if len(holders) < 2:
            return "", 0
        top = max(holders, key=lambda account: account.allowance.num_tokens)
        return top.name, top.allowance.num_tokens


def _differences(samples: Sequence[Sample]) -> tuple[int, int, int]:
    """Tokens computed, tokens computed again, and preemptions, from the first sample to the last."""
    if not samples:
        return 0, 0, 0
    first, last = samples[0], samples[-1]
    num_recomputed = last.stats.recomputed_tokens_total - first.stats.recomputed_tokens_total
    num_computed = num_recomputed + sum(
        getattr(last.stats, name) - getattr(first.stats, name)
        for name in ("prompt_tokens_total", "generation_tokens_total")
    )
    return num_computed, num_recomputed, last.num_preemptions - first.num_preemptions


def _occupancy(stats: EngineStats) -> float:
    return stats.num_requests_running / stats.max_num_seqs if stats.max_num_seqs else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
