"""What paging is worth, on the real pool and scheduler: a small run of the benchmark keeps its targets."""

from itertools import islice

import pytest

from pagedd.bench.paging import (
    KV_FORMS,
    MAX_MODEL_LEN,
    TARGET_CONCURRENCY_RATIO,
    TARGET_FRAGMENTATION,
    measure,
    measure_forms,
    mixed_requests,
)


def test_blocks_of_16_waste_under_5_percent_and_hold_4_times_the_sequences():
    result = measure(16, num_pool_tokens=16 * 1024, num_steps=200, num_warmup_steps=200)
    assert result.fragmentation < TARGET_FRAGMENTATION
    assert result.concurrency_ratio >= TARGET_CONCURRENCY_RATIO


def test_what_a_form_of_the_cache_saves_holds_as_many_more_sequences():
    results = measure_forms(16, num_bf16_tokens=4096, num_steps=100, num_warmup_steps=100)
    assert [result.form for result in results] == list(KV_FORMS)
    for result in results:
        assert result.growth == pytest.approx(1 / result.bytes_ratio, rel=0.15)
        assert (result.open_keys_ratio > 0) == (result.form == "int4")


def test_requests_have_a_mean_length_of_200_and_fit_the_context():
    lengths = [len(r.prompt_token_ids) + r.params.max_tokens for r in islice(mixed_requests(seed=7), 3000)]
    assert 190 < sum(lengths) / len(lengths) < 210
    assert max(lengths) <= MAX_MODEL_LEN
