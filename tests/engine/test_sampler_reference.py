"""Any batch is drawn as by a plain sampler, one row at a time, and no row depends on what is beside or before it."""

import math
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedd.engine.random_stream import uniforms
from pagedd.engine.sampler import Sampler
from pagedd.engine.sampling_params import SamplingParams
from pagedd.engine.sequence import Sequence
from pagedd.kernels import ranking

from .sampling import WAYS, drawing_by, drawn, make_sequence

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


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=150, deadline=None)
@given(st.lists(SEQUENCES, min_size=1, max_size=6), st.integers(0, 2**31), st.sampled_from([5, 1024]))
def test_any_batch_equals_the_row_by_row_reference(way: str, sequences: list[Sequence], seed: int, narrow: int):
    logits = random_logits(len(sequences), seed)
    with drawing_by(way), patch.object(ranking, "_NARROW", narrow):
        sampled = Sampler().sample(logits, sequences)
    for row, sequence, got in zip(logits.tolist(), sequences, sampled, strict=True):
        assert got.error_code is None
        assert got.token_id in reference_tokens(row, sequence, way)
        if sequence.request.params.num_logprobs is None:
            assert got.logprobs is None
        else:
            logprob, top = reference_logprobs(row, got.token_id, sequence.request.params.num_logprobs)
            assert got.logprobs is not None
            assert got.logprobs.logprob == pytest.approx(logprob, abs=1e-4)
            assert [t for t, _ in got.logprobs.top] == [t for t, _ in top]
            assert [p for _, p in got.logprobs.top] == pytest.approx([p for _, p in top], abs=1e-4)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("spread", [1.0, 8.0, 40.0])
@pytest.mark.parametrize(
    "changes", [{}, {"top_k": 1500}, {"top_p": 0.2}, {"top_p": 0.95}, {"top_k": 2900, "top_p": 0.999}, {"min_p": 0.5}]
)
def test_long_rows_are_exact_however_many_tokens_have_to_be_looked_at(way: str, spread: float, changes: dict):
    logits = torch.rand(5, 3001, generator=torch.Generator().manual_seed(3)) * spread
    sequences = [make_sequence(drawn(seed=seed, **changes)) for seed in range(5)]
    with drawing_by(way):
        sampled = Sampler().sample(logits, sequences)
    for row, sequence, got in zip(logits.tolist(), sequences, sampled, strict=True):
        assert got.token_id in reference_tokens(row, sequence, way)


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=30, deadline=None)
@given(SEQUENCES, st.lists(SEQUENCES, min_size=31, max_size=31), st.integers(0, 31), st.integers(0, 2**31))
def test_a_row_is_the_same_alone_and_among_31_others(
    way: str, sequence: Sequence, others: list[Sequence], at: int, seed: int
):
    logits = random_logits(32, seed)
    with drawing_by(way):
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


def reference_tokens(row: list[float], sequence: Sequence, way: str) -> set[int]:
    """The token; in C++, whose exponential is another, also that of a random number or a share just beside it."""
    nudges = (1.0,) if way == "torch" else (1.0, 1 - 2e-6, 1 + 2e-6)
    return {reference_token(row, sequence, of_draw, of_share) for of_draw in nudges for of_share in nudges}


def reference_token(row: list[float], sequence: Sequence, of_draw: float = 1.0, of_share: float = 1.0) -> int:
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
        wanted = params.top_p * of_share * sum(weights[i] for i in kept)
        reached, count = 0, 0
        while count == 0 or (reached < wanted and count < len(kept)):
            reached += weights[kept[count]]
            count += 1
        kept = kept[:count]
    kept = [i for i in kept if weights[i] >= int(params.min_p * 2**40)]

    u = float(uniforms([params.seed], [sequence.choice_index], [sequence.num_tokens])[0])
    total = sum(weights[i] for i in kept)
    target = min(int(u * of_draw * total), total - 1)
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
