"""What a user should change: one rule for each cause, a function of a window of figures.

Owns the rules and their thresholds. Where the figures come from is `doctor.py`'s.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from pagedd.client.percent import percent
from pagedd.client.stats_frame import Advice
from pagedd.engine.kv.quality import LARGER_FORM, KVQuality

# Rules about averages wait for so much work, and those about prompts for so many of them.
LEAST_BUSY_S = 15.0
LEAST_PROMPTS = 16

FRAGMENTATION_BAR = 0.05
# Slots that nobody fills only matter when they could run out.
SCARCE_KV_USAGE = 0.5
IDLE_KV_BAR = 0.8
# Of the time, that requests must have waited for it to be more than a burst.
WAITING_BAR = 0.5
# On a CPU a step of 8 sequences takes 1.4 times as long as of one, one of 32 then 2.8 times as long as of 8
# (bench/results/step-2-cores.json): beyond this, each sequence costs what it brings.
CPU_FULL_SEATS = 16
# The same of the tokens of prompts; beyond this a longer step computes no more of them in a second.
CPU_FULL_TOKENS = 64
# Far from 1, because a seat is empty from the step that ends a sequence to the end of the next step.
FULL_SEATS = 0.6
REPEATED_BAR = 0.25
PREEMPTIONS_PER_MINUTE_BAR = 6.0
DOMINANT_BAR = 0.5
_SMALLER_FORM = {"float32": "int8", "bf16": "int8", "fp16": "int8", "int8": "int4", "fp8": "int4", "k8v4": "int4"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Settings, and figures of the last minutes in which there was work. Ratios are 0–1; None is "not known".

    Attributes:
        busy_s: of work that the averages are over.
        fragmentation: 1 − live tokens / slots of used blocks.
        waiting_ratio: share of the time in which requests waited for a seat or blocks, and not for a pace to be kept.
        kv_usage_waiting, occupancy_waiting: used blocks, and seats taken, while they did.
        recomputed_ratio: tokens computed again after a preemption, over all that were computed.
        num_prompts: in the window, with no salt of their own.
        repeated_ratio: share of their tokens that an earlier prompt began with too, of whoever may share it.
        apart_ratio: the same, but only of callers who may not share it.
        top_caller_share: of the pool's tokens, asked for by the one caller who asked for most, while others were there.
        kv_quality: of the KV cache's form on this model, from the check at its load.
    """

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_dtype: str
    caches_prefixes: bool
    is_cpu: bool = False
    busy_s: float = 0.0
    kv_usage: float = 0.0
    fragmentation: float | None = None
    waiting_ratio: float = 0.0
    kv_usage_waiting: float = 0.0
    occupancy_waiting: float = 0.0
    preemptions_per_minute: float = 0.0
    recomputed_ratio: float = 0.0
    num_prompts: int = 0
    repeated_ratio: float = 0.0
    apart_ratio: float = 0.0
    top_caller: str = ""
    top_caller_share: float = 0.0
    kv_quality: KVQuality | None = None


def advise(window: Window) -> list[Advice]:
    """Everything that should be changed, in the order in which to change it; empty when all is well."""
    return [advice for rule in RULES.values() if (advice := rule(window)) is not None]


def repeated_prefixes(window: Window) -> Advice | None:
    """Prompts begin alike, and what they share is computed for each."""
    if window.num_prompts < LEAST_PROMPTS:
        return None
    if not window.caches_prefixes and window.repeated_ratio >= REPEATED_BAR:
        finding = f"{percent(window.repeated_ratio)} % of prompt tokens began an earlier prompt, and none are kept"
        change, share = "--enable-prefix-caching", window.repeated_ratio
    elif window.caches_prefixes and window.apart_ratio >= REPEATED_BAR:
        finding = f"{percent(window.apart_ratio)} % of prompt tokens began another caller's prompt, and are kept apart"
        change, share = "--prefix-sharing all, if callers may learn by timing what others ask", window.apart_ratio
    else:
        return None
    gain = f"{percent(share)} % fewer prompt tokens to compute, and first tokens sooner by as much"
    return Advice(cause="repeated_prefixes", finding=finding, change=change, gain=gain)


def fragmentation(window: Window) -> Advice | None:
    """Sequences are so short that their last blocks stay empty, and blocks are scarce."""
    value = window.fragmentation
    is_scarce = window.kv_usage >= SCARCE_KV_USAGE
    if not _is_long(window) or value is None or value <= FRAGMENTATION_BAR or not is_scarce or window.block_size <= 8:
        return None
    # Half a block a sequence is lost on average, whatever its size.
    smaller = value / 2 / (1 - value / 2)
    return Advice(
        cause="fragmentation",
        finding=f"{percent(value)} % of slots in used blocks hold nothing, {percent(window.kv_usage)} % of blocks used",
        change=f"--block-size {window.block_size // 2}",
        gain=f"about {percent(smaller)} % of slots lost, room for {percent(value - smaller)} % more tokens",
    )


def idle_blocks(window: Window) -> Advice | None:
    """Requests wait while there are blocks for them."""
    usage = window.kv_usage_waiting
    if not _is_long(window) or window.waiting_ratio < WAITING_BAR or usage >= IDLE_KV_BAR:
        return None
    finding = (
        f"requests waited {percent(window.waiting_ratio)} % of the time with {percent(usage)} % of blocks "
        f"and {percent(window.occupancy_waiting)} % of {window.max_num_seqs} seats in use"
    )
    has_full_seats = window.occupancy_waiting >= FULL_SEATS
    limit, enough = (
        (window.max_num_seqs, CPU_FULL_SEATS) if has_full_seats else (window.max_num_batched_tokens, CPU_FULL_TOKENS)
    )
    if window.is_cpu and limit >= enough:
        change = "no setting: the cores are busy; smaller weights, fewer requests ([quota], docs/quotas.md), or a GPU"
        gain = f"more {'seats' if has_full_seats else 'tokens a step'} would only make each answer slower"
    elif has_full_seats:
        factor = min(IDLE_KV_BAR / max(usage, 0.01), 4.0)
        seats = max(window.max_num_seqs + 1, int(window.max_num_seqs * factor))
        change = f"--max-num-seqs {seats}"
        if seats > window.max_num_batched_tokens:
            change += f" --max-num-batched-tokens {seats}"
        gain = (
            f"up to {seats - window.max_num_seqs} more requests at once; more tokens a second until the device is busy"
        )
    else:
        change = f"--max-num-batched-tokens {2 * window.max_num_batched_tokens}"
        gain = "prompts computed in half as many steps, and admitted sooner; steps take longer"
    return Advice(cause="idle_blocks", finding=finding, change=change, gain=gain)


def steady_preemptions(window: Window) -> Advice | None:
    """Sequences lose their blocks to others again and again, and are computed anew."""
    rate = window.preemptions_per_minute
    if not _is_long(window) or rate < PREEMPTIONS_PER_MINUTE_BAR:
        return None
    recomputed = percent(window.recomputed_ratio)
    smaller = _SMALLER_FORM.get(window.kv_cache_dtype)
    form = "" if smaller is None else f", or --kv-cache-dtype {smaller}"
    return Advice(
        cause="steady_preemptions",
        finding=f"{rate:.0f} a minute for want of blocks; {recomputed} % of tokens computed again",
        change=f"a larger --gpu-memory-utilization{form}; or fewer seats than {window.max_num_seqs} (--max-num-seqs)",
        gain=f"{recomputed} % fewer tokens to compute, and no pauses in answers",
    )


def kv_quality(window: Window) -> Advice | None:
    """The KV cache's form changes more answers of this model than it should."""
    quality = window.kv_quality
    if quality is None or quality.is_good:
        return None
    finding = f"{quality.form} agrees with 16 bits in {percent(quality.agreement, 1)} % of tokens, "
    finding += f"{percent(quality.bar)} % are usual"
    if not math.isfinite(quality.divergence_nats):
        finding = f"over {quality.form} some of the model's predictions are no numbers"
    return Advice(
        cause="kv_quality",
        finding=finding,
        change=f"--kv-cache-dtype {LARGER_FORM[quality.form]}",
        gain="answers as the model gives them, for more memory a token",
    )


def dominant_caller(window: Window) -> Advice | None:
    """One caller asks for most of the pool while others wait beside it."""
    share = window.top_caller_share
    if not _is_long(window) or share < DOMINANT_BAR or window.waiting_ratio < WAITING_BAR:
        return None
    return Advice(
        cause="dominant_caller",
        finding=f"{window.top_caller} asked for {percent(min(1.0, share))} % of the pool while others waited",
        change="[quota] kv_share = 0.5 (docs/quotas.md)",
        gain=f"half of the pool for the others, at the cost of refusals for {window.top_caller}",
    )


RULES: dict[str, Callable[[Window], Advice | None]] = {
    "repeated_prefixes": repeated_prefixes,
    "fragmentation": fragmentation,
    "idle_blocks": idle_blocks,
    "steady_preemptions": steady_preemptions,
    "kv_quality": kv_quality,
    "dominant_caller": dominant_caller,
}


def _is_long(window: Window) -> bool:
    return window.busy_s >= LEAST_BUSY_S
