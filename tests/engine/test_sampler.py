"""The sampler, feature by feature with exact ids, then against a plain row-by-row reference, then for independence."""

import math
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedd.engine import sampler as sampler_module
from pagedd.engine.random_stream import uniforms
from pagedd.engine.request import Request
from pagedd.engine.sampler import Sampler
from pagedd.engine.sampling_params import SamplingParams
from pagedd.engine.sequence import Sequence
from pagedd.engine.step import Sampled
from pagedd.kernels import ranking

NAN, INF = math.nan, math.inf


def make_sequence(
    params: SamplingParams, prompt: list[int] | None = None, output: list[int] | None = None, choice_index: int = 0
) -> Sequence:
    prompt = prompt or [0]
    return Sequence(
        request=Request(request_id="r", prompt_token_ids=prompt, params=params),
        choice_index=choice_index,
        token_ids=prompt + (output or []),
        num_prompt_tokens=len(prompt),
        arrival_s=0.0,
        due_s=0.0,
        order=0,
        priority=0,
    )


def greedy(**changes) -> SamplingParams:
    return SamplingParams(max_tokens=100, temperature=0.0, **changes)


def drawn(**changes) -> SamplingParams:
    return SamplingParams(max_tokens=100, **changes)


def sample_row(logits: list[float], sequence: Sequence) -> Sampled:
    return Sampler().sample(torch.tensor([logits]), [sequence])[0]


def drawn_ids(logits: list[float], count: int = 300, **changes) -> set[int]:
    """Every id that `count` seeds draw."""
    sequences = [make_sequence(drawn(seed=seed, **changes)) for seed in range(count)]
    return {s.token_id for s in Sampler().sample(torch.tensor([logits] * count), sequences)}


# --- greedy ---------------------------------------------------------------------------------------------------------


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


# --- penalties, bias, minimum length --------------------------------------------------------------------------------


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_prompt_and_output():
    sequence = make_sequence(greedy(repetition_penalty=2.0), prompt=[0], output=[1])
    assert sample_row([4.0, 3.0, 2.1], sequence).token_id == 2  # 2, 1.5, 2.1
    assert sample_row([-1.0, -1.2, -1.9], sequence).token_id == 2  # -2, -2.4, -1.9


def test_repetition_penalty_counts_a_repeated_token_once():
    sequence = make_sequence(greedy(repetition_penalty=2.0), prompt=[0, 0, 0], output=[0])
    assert sample_row([4.0, 1.9], sequence).token_id == 0  # 2, not 0.25


def test_presence_penalty_is_for_output_tokens_once_each():
    sequence = make_sequence(greedy(presence_penalty=1.0), prompt=[0], output=[1, 1, 1])
    assert sample_row([1.0, 2.5, 1.4], sequence).token_id == 1  # 1, 1.5, 1.4
    assert sample_row([1.0, 1.9, 0.0], sequence).token_id == 0  # the prompt's token is free


def test_frequency_penalty_is_once_per_occurrence_in_the_output():
    sequence = make_sequence(greedy(frequency_penalty=1.0), prompt=[1], output=[1, 1, 2])
    assert sample_row([0.0, 2.5, 1.4], sequence).token_id == 1  # 0, 0.5, 0.4
    assert sample_row([0.0, 1.9, 0.9], sequence).token_id == 0  # 0, -0.1, -0.1


def test_negative_penalties_reward():
    sequence = make_sequence(greedy(presence_penalty=-1.0), output=[1])
    assert sample_row([0.5, 0.0, 0.9], sequence).token_id == 1


def test_penalties_follow_the_sequence_as_it_grows():
    sampler = Sampler()
    sequence = make_sequence(greedy(frequency_penalty=1.0), prompt=[2])
    produced = []
    for _ in range(5):
        token_id = sampler.sample(torch.tensor([[2.2, 1.7, 0.0]]), [sequence])[0].token_id
        sequence.token_ids.append(token_id)
        produced.append(token_id)
    assert produced == [0, 1, 0, 1, 0]


def test_logit_bias_bans_and_forces():
    assert sample_row([5.0, 1.0, 0.0], make_sequence(greedy(logit_bias={0: -100.0}))).token_id == 1
    assert sample_row([5.0, 1.0, 0.0], make_sequence(greedy(logit_bias={2: 100.0}))).token_id == 2


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1.0])
def test_a_bias_beyond_float32_still_forces(temperature: float):
    params = SamplingParams(max_tokens=1, temperature=temperature, logit_bias={2: 1e300, 1: -1e300})
    assert sample_row([5.0, 1.0, 0.0], make_sequence(params)).token_id == 2


def test_ids_outside_the_logits_are_harmless():
    params = greedy(logit_bias={99: 100.0}, stop_token_ids=(77,), min_tokens=5)
    assert sample_row([0.0, 1.0], make_sequence(params)).token_id == 1


def test_stop_ids_are_withheld_until_min_tokens_are_out():
    params = greedy(min_tokens=2, stop_token_ids=(0, 1), logit_bias={0: 100.0})
    assert sample_row([9.0, 8.0, 1.0], make_sequence(params, output=[2])).token_id == 2
    assert sample_row([9.0, 8.0, 1.0], make_sequence(params, output=[2, 2])).token_id == 0


# --- temperature and filters ----------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("changes", [{"top_k": 1500}, {"top_p": 0.2}, {"top_p": 0.95}, {"top_k": 2900, "top_p": 0.999}])
def test_filters_that_need_more_than_the_narrow_ranking_are_exact(changes: dict):
    logits = torch.rand(4, 3000, generator=torch.Generator().manual_seed(3))
    sequences = [make_sequence(drawn(seed=seed, **changes)) for seed in range(4)]
    assert [s.token_id for s in Sampler().sample(logits, sequences)] == [
        reference_token(row.tolist(), sequence) for row, sequence in zip(logits, sequences, strict=True)
    ]


def test_draws_follow_the_distribution():
    probabilities = np.array([0.5, 0.25, 0.125, 0.1, 0.025])
    count = 4000
    sequence_of = [make_sequence(drawn(seed=11), prompt=[0] * (i + 1)) for i in range(count)]
    logits = torch.tensor(np.log(probabilities), dtype=torch.float32).repeat(count, 1)
    ids = [s.token_id for s in Sampler().sample(logits, sequence_of)]
    observed = np.bincount(ids, minlength=5)
    chi_square = ((observed - count * probabilities) ** 2 / (count * probabilities)).sum()
    assert chi_square < 18.5  # 0.1 % point of 4 degrees of freedom; the seed is fixed, so this cannot flicker


def test_the_draw_is_the_first_token_whose_cumulative_weight_exceeds_it():
    weights = torch.tensor([[0, 1, 0, 3, 0]]).repeat(4, 1)
    draws = torch.tensor([0.0, 0.24, 0.25, 1 - 2**-53], dtype=torch.float64)
    assert sampler_module._invert_cdf(weights, draws).tolist() == [1, 1, 3, 3]


# --- broken rows ----------------------------------------------------------------------------------------------------


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


# --- log-probabilities ----------------------------------------------------------------------------------------------


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


# --- independence ---------------------------------------------------------------------------------------------------

PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.just(100),
    min_tokens=st.integers(0, 6),
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 0.8, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 64, 65, 80, 1000]),
    top_p=st.sampled_from([1e-6, 0.3, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.7, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.3, 1e-12, 1e12]),
    presence_penalty=st.sampled_from([0.0, -2.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, -0.5, 0.5, 2.0]),
    logit_bias=st.dictionaries(st.integers(0, 99), st.sampled_from([-1e6, -100.0, -1.0, 2.5, 100.0]), max_size=4),
    num_logprobs=st.sampled_from([None, 0, 2, 70]),
    seed=st.integers(0, 2**64 - 1),
    stop_token_ids=st.lists(st.integers(0, 99), max_size=3, unique=True).map(tuple),
)
SEQUENCES = st.builds(
    make_sequence,
    PARAMS,
    st.lists(st.integers(0, 99), min_size=1, max_size=12),
    st.lists(st.integers(0, 99), max_size=12),
    st.integers(0, 5),
)


def random_logits(num_rows: int, seed: int) -> torch.Tensor:
    """Rows of 100, rounded to quarters so that ties are common."""
    logits = torch.randn(num_rows, 100, generator=torch.Generator().manual_seed(seed)) * 3
    return (logits * 4).round() / 4


@settings(max_examples=150, deadline=None)
@given(st.lists(SEQUENCES, min_size=1, max_size=6), st.integers(0, 2**31), st.sampled_from([5, 1024]))
def test_any_batch_equals_the_row_by_row_reference(sequences: list[Sequence], seed: int, narrow: int):
    logits = random_logits(len(sequences), seed)
    with patch.object(ranking, "_NARROW", narrow):
        sampled = Sampler().sample(logits, sequences)
    for row, sequence, got in zip(logits.tolist(), sequences, sampled, strict=True):
        assert got.error_code is None
        assert got.token_id == reference_token(row, sequence)
        if sequence.request.params.num_logprobs is None:
            assert got.logprobs is None
        else:
            logprob, top = reference_logprobs(row, got.token_id, sequence.request.params.num_logprobs)
            assert got.logprobs is not None
            assert got.logprobs.logprob == pytest.approx(logprob, abs=1e-4)
            assert [t for t, _ in got.logprobs.top] == [t for t, _ in top]
            assert [p for _, p in got.logprobs.top] == pytest.approx([p for _, p in top], abs=1e-4)


@settings(max_examples=30, deadline=None)
@given(SEQUENCES, st.lists(SEQUENCES, min_size=31, max_size=31), st.integers(0, 31), st.integers(0, 2**31))
def test_a_row_is_the_same_alone_and_among_31_others(sequence: Sequence, others: list[Sequence], at: int, seed: int):
    logits = random_logits(32, seed)
    alone = Sampler().sample(logits[at : at + 1], [sequence])[0]
    among_others = Sampler().sample(logits, [*others[:at], sequence, *others[at:]])[at]
    assert among_others.token_id == alone.token_id


def test_a_draw_depends_on_seed_choice_and_position_only():
    def draws(**changes) -> list[int]:
        sampler = Sampler()
        sequence = make_sequence(drawn(seed=changes.get("seed", 42)), choice_index=changes.get("choice_index", 0))
        ids = []
        for _ in range(20):
            ids.append(sampler.sample(torch.zeros(1, 1000), [sequence])[0].token_id)
            sequence.token_ids.append(ids[-1])
        return ids

    first = draws()
    assert draws() == first
    assert draws(choice_index=1) != first
    assert draws(seed=43) != first
    assert len(set(first)) > 15


def test_a_preempted_sequence_continues_as_if_nothing_happened():
    params = drawn(seed=9, repetition_penalty=1.5, frequency_penalty=0.5)
    logits = random_logits(1, seed=1)
    straight = make_sequence(params, prompt=[1, 2])
    sampler = Sampler()
    for _ in range(10):
        straight.token_ids.append(sampler.sample(logits, [straight])[0].token_id)
    resumed = make_sequence(params, prompt=[1, 2], output=straight.output_token_ids[:4])
    restarted = Sampler()
    for _ in range(6):
        resumed.token_ids.append(restarted.sample(logits, [resumed])[0].token_id)
    assert resumed.token_ids == straight.token_ids


# --- the reference: one row, plain Python, in the order of the module's docstring -----------------------------------


def reference_token(row: list[float], sequence: Sequence) -> int:
    params = sequence.request.params
    logits = np.array(row, dtype=np.float32)
    output = sequence.output_token_ids
    for token_id in set(sequence.token_ids):
        penalty = np.float32(params.repetition_penalty)
        value = logits[token_id]
        logits[token_id] = value / penalty if value > 0 else value * penalty
        logits[token_id] -= np.float32(
            params.presence_penalty * (token_id in output) + params.frequency_penalty * output.count(token_id)
        )
    for token_id, amount in params.logit_bias.items():
        logits[token_id] += np.float32(amount)
    if len(output) < params.min_tokens:
        logits[list(params.stop_token_ids)] = -np.inf
    ranking = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if params.temperature == 0:
        return ranking[0]

    # torch's exp, so that the weights agree to the last bit.
    relative = (torch.from_numpy(logits) - logits.max().item()) / np.float32(params.temperature).item()
    weights = [int(w * 2**40) for w in relative.exp().tolist()]
    kept = ranking[: params.top_k or None]
    if params.top_p < 1:
        wanted = params.top_p * sum(weights[i] for i in kept)
        reached, count = 0, 0
        while count == 0 or (reached < wanted and count < len(kept)):
            reached += weights[kept[count]]
            count += 1
        kept = kept[:count]
    kept = [i for i in kept if weights[i] >= int(params.min_p * 2**40)]

    u = float(uniforms([params.seed], [sequence.choice_index], [sequence.num_tokens])[0])
    total = sum(weights[i] for i in kept)
    target = min(int(u * total), total - 1)
    reached = 0
    for token_id in sorted(kept):
        reached += weights[token_id]
        if reached > target:
            return token_id
    raise AssertionError("the cumulative weight never reached the target")


def reference_logprobs(row: list[float], token_id: int, count: int) -> tuple[float, list[tuple[int, float]]]:
    normalizer = math.log(sum(math.exp(x - max(row)) for x in row)) + max(row)
    ranking = sorted(range(len(row)), key=lambda i: (-row[i], i))
    return row[token_id] - normalizer, [(i, row[i] - normalizer) for i in ranking[:count]]
