"""Advice: each of six situations is named by its cause alone, and a healthy daemon hears nothing."""

import math
from dataclasses import replace

import pytest

from pagedd.daemon.advice import RULES, Window, advise
from pagedd.engine.kv.quality import KVQuality


def quality(form: str, agreement: float, divergence_nats: float = 0.01) -> KVQuality:
    return KVQuality(form=form, agreement=agreement, divergence_nats=divergence_nats, num_tokens=768)


HEALTHY = Window(
    block_size=16,
    max_num_seqs=32,
    max_num_batched_tokens=512,
    kv_cache_dtype="int8",
    caches_prefixes=True,
    busy_s=120.0,
    kv_usage=0.9,
    fragmentation=0.03,
    waiting_ratio=0.6,
    kv_usage_waiting=0.92,
    occupancy_waiting=0.7,
    preemptions_per_minute=1.0,
    recomputed_ratio=0.01,
    num_prompts=200,
    repeated_ratio=0.7,
    apart_ratio=0.1,
    top_caller="ana",
    top_caller_share=0.4,
    kv_quality=quality("int8", 0.98),
)
SITUATIONS = {
    "fragmentation": (
        {"fragmentation": 0.12},
        "12 % of slots in used blocks hold nothing, 90 % of blocks used",
        "--block-size 8",
    ),
    "idle_blocks": (
        {"kv_usage_waiting": 0.4, "occupancy_waiting": 1.0},
        "requests waited 60 % of the time with 40 % of blocks and 100 % of 32 seats in use",
        "--max-num-seqs 64",
    ),
    "repeated_prefixes": (
        {"caches_prefixes": False},
        "70 % of prompt tokens began an earlier prompt, and none are kept",
        "--enable-prefix-caching",
    ),
    "steady_preemptions": (
        {"preemptions_per_minute": 20.0, "recomputed_ratio": 0.15},
        "20 a minute for want of blocks; 15 % of tokens computed again",
        "a larger --gpu-memory-utilization, or --kv-cache-dtype int4; or fewer seats than 32 (--max-num-seqs)",
    ),
    "kv_quality": (
        {"kv_quality": quality("int8", 0.931)},
        "int8 agrees with 16 bits in 93.1 % of tokens, 94 % are usual",
        "--kv-cache-dtype bf16",
    ),
    "dominant_caller": (
        {"top_caller_share": 0.8},
        "ana asked for 80 % of the pool while others waited",
        "[quota] kv_share = 0.5 (docs/quotas.md)",
    ),
}


def test_a_healthy_daemon_hears_nothing() -> None:
    assert advise(HEALTHY) == []


@pytest.mark.parametrize("code", SITUATIONS)
def test_each_situation_is_named_by_its_cause_alone(code: str) -> None:
    change, finding, what_to_do = SITUATIONS[code]
    [advice] = advise(replace(HEALTHY, **change))  # type: ignore[arg-type]
    assert (advice.cause, advice.finding, advice.change) == (code, finding, what_to_do)
    assert advice.gain


def test_every_rule_has_its_situation() -> None:
    assert set(SITUATIONS) == set(RULES)


def test_prefixes_of_other_callers_are_another_setting() -> None:
    [advice] = advise(replace(HEALTHY, apart_ratio=0.5))
    assert advice.cause == "repeated_prefixes"
    assert advice.change.startswith("--prefix-sharing all")


def test_free_seats_while_requests_wait_are_a_matter_of_the_token_budget() -> None:
    [advice] = advise(replace(HEALTHY, kv_usage_waiting=0.4, occupancy_waiting=0.5))
    assert (advice.cause, advice.change) == ("idle_blocks", "--max-num-batched-tokens 1024")


def test_more_seats_than_a_step_has_tokens_need_a_larger_step() -> None:
    [advice] = advise(
        replace(HEALTHY, kv_usage_waiting=0.2, occupancy_waiting=1.0, max_num_seqs=200, max_num_batched_tokens=256)
    )
    assert advice.change == "--max-num-seqs 800 --max-num-batched-tokens 800"


@pytest.mark.parametrize(
    "harmless",
    [
        {"fragmentation": 0.3, "kv_usage": 0.05},  # one short chat: nobody lacks its slots
        {"fragmentation": 0.3, "block_size": 8},  # there is no smaller block
        {"kv_usage_waiting": 0.1, "waiting_ratio": 0.1},  # a burst
        {"caches_prefixes": False, "num_prompts": 5},  # chance
        {"kv_quality": None},  # not checked, or there is nothing to compare with
        {"top_caller_share": 1.0, "waiting_ratio": 0.0},  # nobody is kept waiting
        {"busy_s": 3.0, "fragmentation": 0.5, "preemptions_per_minute": 99.0, "top_caller_share": 1.0},
    ],
)
def test_what_harms_nobody_is_no_advice(harmless: dict[str, object]) -> None:
    assert advise(replace(HEALTHY, **harmless)) == []  # type: ignore[arg-type]


def test_without_work_there_is_no_advice() -> None:
    idle = Window(
        block_size=16, max_num_seqs=32, max_num_batched_tokens=512, kv_cache_dtype="int4", caches_prefixes=False
    )
    assert advise(idle) == []


def test_little_is_not_nothing_and_much_is_not_all() -> None:
    (preempted,) = advise(replace(HEALTHY, preemptions_per_minute=20.0, recomputed_ratio=0.004))
    assert preempted.finding.endswith("<1 % of tokens computed again")
    (poor,) = advise(replace(HEALTHY, kv_quality=quality("int4", 0.0004)))
    assert "in <0.1 % of tokens" in poor.finding


def test_predictions_that_are_no_numbers_are_advised_against_though_all_agree() -> None:
    (advice,) = advise(replace(HEALTHY, kv_quality=quality("int8", 1.0, divergence_nats=math.nan)))
    assert (advice.cause, advice.change) == ("kv_quality", "--kv-cache-dtype bf16")
    assert advice.finding == "over int8 some of the model's predictions are no numbers"


def test_seats_are_not_advised_where_the_cores_are_busy_with_those_there_are() -> None:
    waiting = replace(HEALTHY, kv_usage_waiting=0.4, occupancy_waiting=1.0, is_cpu=True)
    [advice] = advise(waiting)
    assert (advice.cause, advice.change[:10]) == ("idle_blocks", "no setting")
    assert "--max-num-seqs" not in advice.change
    [advice] = advise(replace(waiting, max_num_seqs=8))
    assert advice.change == "--max-num-seqs 16"


def test_longer_steps_are_not_advised_where_the_cores_are_busy_with_those_there_are() -> None:
    waiting = replace(HEALTHY, kv_usage_waiting=0.4, occupancy_waiting=0.3, is_cpu=True)
    [advice] = advise(waiting)
    assert (advice.cause, advice.change[:10]) == ("idle_blocks", "no setting")
    [advice] = advise(replace(waiting, max_num_seqs=8, max_num_batched_tokens=16))
    assert advice.change == "--max-num-batched-tokens 32"
