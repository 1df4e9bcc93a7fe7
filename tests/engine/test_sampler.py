"""The sampler, feature by feature, with exact ids: filters, draws, rows that are broken, log-probabilities."""

import math

import numpy as np
import pytest
import torch

from pagedd.engine.sampler import Sampler
from pagedd.engine.sampling_params import SamplingParams

from .sampling import drawn, greedy, make_sequence, sample_row

NAN, INF = math.nan, math.inf


def drawn_ids(logits: list[float], count: int = 300, **changes) -> set[int]:
    """Every id that `count` seeds draw."""
    sequences = [make_sequence(drawn(seed=seed, **changes)) for seed in range(count)]
    return {s.token_id for s in Sampler().sample(torch.tensor([logits] * count), sequences)}


def test_greedy_takes_the_highest_logit():
    assert sample_row([0.0, 3.0, 1.0], make_sequence(greedy())).token_id == 1


@pytest.mark.parametrize("vocab_size", [5, 1000, 49152])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_greedy_ties_go_to_the_lowest_id(vocab_size: int, num_rows: int):
    logits = torch.zeros(num_rows, vocab_size)
    logits[:, [2, 3, vocab_size - 1]] = 1.0
    sampled = Sampler().sample(logits, [make_sequence(greedy())] * num_rows)
    assert [s.token_id for s in sampled] == [2] * num_rows


def test_an_empty_batch_has_no_tokens():
    assert Sampler().sample(torch.empty(0, 8), []) == []


def test_without_filters_every_token_can_be_drawn():
    assert drawn_ids([0.0, 0.0, 0.0]) == {0, 1, 2}


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-300])
def test_a_tiny_temperature_is_greedy_and_finite(temperature: float):
    assert drawn_ids([1.0, 1e4, -1e4, 1e4 - 1], count=20, temperature=temperature) == {1}


def test_a_huge_temperature_is_uniform():
    assert drawn_ids([1.0, 50.0, -50.0], temperature=1e9) == {0, 1, 2}


def test_top_k_keeps_exactly_k():
    logits = [1.0, 3.0, 2.0, 2.9]
    assert drawn_ids(logits, top_k=1) == {1}
    assert drawn_ids(logits, top_k=2) == {1, 3}
    assert drawn_ids(logits, top_k=4) == drawn_ids(logits, top_k=10**9) == drawn_ids(logits) == {0, 1, 2, 3}


def test_top_k_takes_the_lower_ids_among_equals():
    assert drawn_ids([1.0, 1.0, 1.0, 1.0], top_k=2) == {0, 1}
    assert drawn_ids([-0.0, 0.0, -0.0, 0.0], top_k=2) == {0, 1}


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    logits = np.log([0.1, 0.4, 0.3, 0.2]).tolist()
    assert drawn_ids(logits, top_p=1e-9) == {1}
    assert drawn_ids(logits, top_p=0.39) == {1}
    assert drawn_ids(logits, top_p=0.69) == {1, 2}
    assert drawn_ids(logits, top_p=0.71) == {1, 2, 3}
    assert drawn_ids(logits, top_p=1.0) == {0, 1, 2, 3}


def test_top_p_takes_the_lower_ids_among_equals():
    assert drawn_ids([0.0, 0.0, 0.0, 0.0], top_p=0.5) == {0, 1}


def test_top_p_is_a_share_of_what_top_k_left():
    logits = np.log([0.4, 0.3, 0.2, 0.1]).tolist()
    assert drawn_ids(logits, top_p=0.6) == {0, 1}  # 0.4 of 1 does not reach 0.6
    assert drawn_ids(logits, top_p=0.56, top_k=2) == {0}  # 0.4 of 0.7 does


def test_min_p_is_relative_to_the_best():
    logits = np.log([0.5, 0.26, 0.24]).tolist()
    assert drawn_ids(logits, min_p=0.5) == {0, 1}
    assert drawn_ids(logits, min_p=1.0) == {0}
    assert drawn_ids([1.0, 1.0, 0.0], min_p=1.0) == {0, 1}


def test_top_k_1_is_greedy_even_where_temperature_blurs():
    logits = [1.0, math.nextafter(1.0, 2.0) + 1e-6, 1.0]
    assert drawn_ids(logits, top_k=1, temperature=100.0) == {1}


def test_draws_follow_the_distribution():
    probabilities = np.array([0.5, 0.25, 0.125, 0.1, 0.025])
    count = 4000
    sequence_of = [make_sequence(drawn(seed=11), prompt=[0] * (i + 1)) for i in range(count)]
    logits = torch.tensor(np.log(probabilities), dtype=torch.float32).repeat(count, 1)
    ids = [s.token_id for s in Sampler().sample(logits, sequence_of)]
    observed = np.bincount(ids, minlength=5)
    chi_square = ((observed - count * probabilities) ** 2 / (count * probabilities)).sum()
    assert chi_square < 18.5  # 0.1 % point of 4 degrees of freedom; the seed is fixed, so this cannot flicker


@pytest.mark.parametrize(
    "params", [greedy(), drawn(), drawn(top_k=2), drawn(top_p=0.5, min_p=0.1), greedy(num_logprobs=2)]
)
@pytest.mark.parametrize("broken", [[NAN, 1.0, 2.0], [1.0, INF, 2.0], [-INF] * 3, [NAN] * 3, [2.0, 1.0, NAN]])
@pytest.mark.parametrize("num_others", [0, 2000])  # a row wide enough to be ranked in part
def test_a_broken_row_fails_alone(params: SamplingParams, broken: list[float], num_others: int):
    good = [-INF, 9000.0, -INF]
    logits = torch.tensor([row + row[-1:] * num_others for row in (good, broken, good)])
    sampled = Sampler().sample(logits, [make_sequence(params) for _ in range(3)])
    assert [s.error_code for s in sampled] == [None, "nan_logits", None]
    assert [sampled[0].token_id, sampled[2].token_id] == [1, 1]


def test_adjustments_do_not_hide_a_broken_row():
    params = greedy(logit_bias={0: -100.0}, stop_token_ids=(1,), min_tokens=9, repetition_penalty=1.3)
    for broken in ([NAN, 0.0, 1.0], [0.0, NAN, 1.0], [0.0, INF, 1.0], [INF, 0.0, 1.0]):
        assert sample_row(broken, make_sequence(params, prompt=[0, 1])).error_code == "nan_logits"


def test_a_row_left_without_any_token_fails():
    params = drawn(stop_token_ids=(0, 1, 2), min_tokens=1)
    assert sample_row([0.0, 0.0, 0.0], make_sequence(params)).error_code == "nan_logits"


def test_logprobs_are_of_the_raw_logits_best_first_and_ties_by_id():
    logits = np.log([0.1, 0.4, 0.1, 0.4]).tolist()
    sampled = sample_row(logits, make_sequence(greedy(num_logprobs=3, logit_bias={0: 100.0})))
    assert sampled.token_id == 0
    assert sampled.logprobs is not None
    assert sampled.logprobs.logprob == pytest.approx(math.log(0.1), abs=1e-6)
    assert [token_id for token_id, _ in sampled.logprobs.top] == [1, 3, 0]
    assert [p for _, p in sampled.logprobs.top] == pytest.approx(np.log([0.4, 0.4, 0.1]).tolist(), abs=1e-6)


def test_each_row_gets_as_many_logprobs_as_it_asked_for():
    sequences = [make_sequence(greedy(num_logprobs=k)) for k in (None, 0, 1, 9)]
    sampled = Sampler().sample(torch.tensor([[3.0, 2.0, 1.0]] * 4), sequences)
    assert sampled[0].logprobs is None
    assert [len(s.logprobs.top) for s in sampled[1:] if s.logprobs] == [0, 1, 3]
    assert len({s.logprobs.logprob for s in sampled[1:] if s.logprobs}) == 1


def test_the_callers_logits_are_left_alone():
    logits = torch.tensor([[1.0, 2.0, 3.0]] * 2)
    kept = logits.clone()
    params = drawn(logit_bias={0: 5.0}, repetition_penalty=2.0, top_k=2, min_p=0.1, stop_token_ids=(1,), min_tokens=3)
    Sampler().sample(logits, [make_sequence(params), make_sequence(greedy())])
    assert torch.equal(logits, kept)
