"""The order of advice: prefix caching, block size, memory share, seats, then the form of the KV cache by accuracy.

Each step tries a few values beside the one that holds and keeps the best, if it is better by more than chance. Pure but
for the trials it asks for, so that tests decide what comes of them.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from pagedd.client.percent import percent
from pagedd.daemon.tune.agreement import agreement
from pagedd.daemon.tune.trial import TrialResult
from pagedd.engine.config import BLOCK_SIZES, DEFAULT_MEMORY_SHARE, EngineConfig
from pagedd.engine.kv.quality import AGREEMENT_BARS

# Two rounds of the same settings differ by so much.
LEAST_GAIN = 1.03
# Above this a pool is the limit; below, more memory changes nothing.
FULL_POOL = 0.85
SHARES = {"cuda": (0.95,), "cpu": (0.5, 0.7)}
# Of its time, that a trial may have waited for cores which others had; one that waited more is tried once more.
MAX_WAITED = 0.1
QUANTIZED = ("int8", "fp8", "k8v4", "int4")


@dataclass(frozen=True, slots=True)
class Tried:
    """One trial, and what held when it was made (`before`, measured beside it; None for the first).

    `is_repeated` marks a line of no trial of its own: what a step came to, or why nothing was tried in it.
    """

    step: str
    changed: dict[str, Any]
    result: TrialResult
    before: TrialResult | None
    note: str = ""
    is_kept: bool = False
    is_repeated: bool = False

    @property
    def is_judged(self) -> bool:
        """Whether it could have won: both sides of the comparison ran, and undisturbed."""
        return self.before is not None and _is_sound(self.before) and _is_sound(self.result)

    @property
    def gain(self) -> float | None:
        """Its output tokens/s over those before; None when it could not be had."""
        if self.before is None or self.result.error or not self.before.output_tokens_per_s:
            return None
        return self.result.output_tokens_per_s / self.before.output_tokens_per_s


Try = Callable[[EngineConfig, "list[list[int]] | None"], TrialResult]


class Tuning:
    """Settings that get better from step to step.

    Attributes:
        config: the best so far.
        changes: what differs from the settings at the start.
    """

    def __init__(self, config: EngineConfig, attempt: Try, texts: list[list[int]], *, is_gpu: bool) -> None:
        """`texts`: token ids; what the model says about them judges forms of the KV cache."""
        self.config = config
        self.changes: dict[str, Any] = {}
        self._attempt = attempt
        self._texts = texts
        self._device = "cuda" if is_gpu else "cpu"
        self._best = TrialResult()
        self._num_steps = 0

    def run(self) -> Iterator[Tried]:
        """Every trial, when its step is decided. Whoever stops listening keeps what was decided until then."""
        self._best = self._try(self.config)
        yield Tried("as configured", {}, self._best, None, _note(self._best), is_kept=True)
        if self._best.error:
            return
        yield from self._step("prefix caching", self._others("enable_prefix_caching", (True, False)))
        yield from self._step("block size", self._others("block_size", BLOCK_SIZES))
        yield from self._memory_share()
        yield from self._seats()
        yield from self._kv_form()

    def _try(self, config: EngineConfig, texts: list[list[int]] | None = None) -> TrialResult:
        result = self._attempt(config, texts)
        if is_disturbed(result):
            with suppress(TimeoutError):  # the next trial will say so
                again = self._attempt(config, texts)
                return min(result, again, key=lambda each: (bool(each.error), each.waited_ratio))
        return result

    def _measure_again(self) -> None:
        """What holds, beside what is tried next: a machine that does other things is not as quick as minutes ago."""
        again = self._try(self.config)
        if not again.error:
            self._best = again

    def _step(self, name: str, options: list[dict[str, Any]]) -> Iterator[Tried]:
        if not options:
            return
        if self._num_steps:
            self._measure_again()
        self._num_steps += 1
        before, best, kept = self._best, self._best, None
        tried = []
        for changed in options:
            result = self._try(replace(self.config, **changed))
            tried.append(Tried(name, changed, result, before, _note(result)))
            if _is_sound(result) and _is_sound(before) and result.output_tokens_per_s > best.output_tokens_per_s:
                best, kept = result, changed
        again = None
        if kept is not None and best.output_tokens_per_s >= LEAST_GAIN * before.output_tokens_per_s:
            again = self._compare_again(name, kept)
        for one in tried:
            if again is not None and one.changed == kept:
                one = replace(one, is_kept=again.is_kept, note=", ".join(filter(None, (one.note, again.note))))
            yield one

    def _compare_again(self, name: str, changed: dict[str, Any]) -> Tried:
        """Keeps `changed` if it is better in a second comparison as well, side by side: machines have moods."""
        held = self._try(self.config)
        again = Tried(name, changed, self._try(replace(self.config, **changed)), held)
        note = "not judged when tried again" if again.gain is None else f"{change(again.gain)} when tried again"
        if again.is_judged and again.gain is not None and again.gain >= LEAST_GAIN:
            self._keep(changed, again.result)
            return replace(again, note=note, is_kept=True)
        self._best = held if not held.error else self._best
        return replace(again, note=note)

    def _memory_share(self) -> Iterator[Tried]:
        """Larger shares, where the pool is what limits; else a line that says why none was tried."""
        share = self.config.gpu_memory_utilization or DEFAULT_MEMORY_SHARE[self._device]
        larger = [{"gpu_memory_utilization": value} for value in SHARES[self._device] if value > share]
        why_not = ""
        if self._best.kv_usage < FULL_POOL and not self._best.preemptions_per_s:
            why_not = f"{percent(self._best.kv_usage)} % of the pool is in use"
        elif self.config.num_blocks is not None:
            why_not = f"num_blocks = {self.config.num_blocks} decides"
        elif not larger:
            why_not = f"{share:g} is as much as is tried"
        if why_not:
            yield Tried("memory share", {}, self._best, None, f"none tried: {why_not}", is_repeated=True)
        else:
            yield from self._step("memory share", larger)

    def _seats(self) -> Iterator[Tried]:
        """Doubled as long as that brings more; halved when it brings nothing."""
        has_grown = False
        while True:
            before = self.config.max_num_seqs
            yield from self._step("seats", [self._with_seats(2 * before)])
            if self.config.max_num_seqs == before:
                break
            has_grown = True
        if not has_grown and before > 1:
            yield from self._step("seats", [self._with_seats(before // 2)])

    def _with_seats(self, seats: int) -> dict[str, Any]:
        changed: dict[str, Any] = {"max_num_seqs": seats}
        if seats > self._best.max_num_batched_tokens:
            changed["max_num_batched_tokens"] = seats
        return changed

    def _kv_form(self) -> Iterator[Tried]:
        """A quantized form must choose as the 16-bit one does, and be quicker than what holds."""
        self._measure_again()
        reference = self._try(replace(self.config, kv_cache_dtype="bf16"), self._texts)
        before, held = self._best, self._best.kv_cache_dtype
        note = _note(reference) or "the reference"
        yield Tried("KV form", {"kv_cache_dtype": "bf16"}, reference, before, note)
        if reference.error or reference.choices is None:
            return
        agreements: dict[str, float] = {"bf16": 1.0}
        results = {"bf16": reference, held: self._best}
        for form in QUANTIZED:
            result = self._try(replace(self.config, kv_cache_dtype=form), self._texts)
            if result.error or result.choices is None:
                yield Tried("KV form", {"kv_cache_dtype": form}, result, before, result.error)
                continue
            agreements[form], results[form] = agreement(result.choices, reference.choices), result
            note = f"{percent(agreements[form], 1)} % as 16 bits, {percent(AGREEMENT_BARS[form])} % wanted"
            notes = ", ".join(each for each in (note, _note(result)) if each)
            yield Tried("KV form", {"kv_cache_dtype": form}, result, before, notes)
        num_choices = len(reference.choices)
        good = [form for form, value in agreements.items() if not _falls_short(value, num_choices, form)]
        sound = [form for form in good if _is_sound(results[form])] or good
        best = max(sound, key=lambda form: results[form].output_tokens_per_s)
        is_bad = held not in good and held in agreements
        is_quicker = results[best].output_tokens_per_s >= LEAST_GAIN * before.output_tokens_per_s
        if is_bad or (is_quicker and _is_sound(before)):
            changed = {"kv_cache_dtype": best}
            self._keep(changed, results[best])
            yield Tried("KV form", changed, results[best], before, "chosen", is_kept=True, is_repeated=True)

    def _others(self, name: str, values: tuple[Any, ...]) -> list[dict[str, Any]]:
        return [{name: value} for value in values if value != getattr(self.config, name)]

    def _keep(self, changed: dict[str, Any], result: TrialResult) -> None:
        self.config = replace(self.config, **changed)
        self.changes |= changed
        self._best = result


def change(gain: float) -> str:
    """Of a ratio, for people: 1.09 is `+9 %`."""
    return f"{100 * (gain - 1):+.0f} %"


def _falls_short(agreement: float, num_choices: int, form: str) -> bool:
    """By more than chance: two standard deviations of as many choices at the bar."""
    bar = AGREEMENT_BARS.get(form, 0.0)
    return agreement < bar - 2 * math.sqrt(bar * (1 - bar) / num_choices)


def is_disturbed(result: TrialResult) -> bool:
    """Whether its speed is that of what else ran on the machine."""
    return result.waited_ratio > MAX_WAITED


def _is_sound(result: TrialResult) -> bool:
    """Whether its speed is that of its settings."""
    return not result.error and not is_disturbed(result)


def _note(result: TrialResult) -> str:
    if result.error or not is_disturbed(result):
        return result.error
    return f"not judged: others had the cores {percent(result.waited_ratio)} % of the time"
