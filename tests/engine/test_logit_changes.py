"""What is done to logits before a draw: penalties, biases, minimum lengths; also over a token only the device knows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedd.engine.draw import PendingTokens
from pagedd.engine.logit_changes import LogitChanges
from pagedd.engine.sampler import Sampler
from pagedd.engine.sampling_params import SamplingParams
from pagedd.engine.sequence import PENDING

from .sampling import drawn, greedy, make_sequence, sample_row

VOCAB_SIZE = 8


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


def test_a_pending_token_counts_as_one_more_of_its_kind() -> None:
    logits = torch.tensor([[4.0, 4.0, 4.0, 4.0]])
    sequence = make_sequence(drawn(frequency_penalty=1.0), [0], [1, 1, PENDING])

    def changed(newest: int) -> list[list[float]]:
        pending = PendingTokens({sequence: 1}, torch.tensor([3, newest]))
        return LogitChanges().apply(logits, [sequence], [0], pending).tolist()

    assert changed(1) == [[4.0, 1.0, 4.0, 4.0]]
    assert changed(2) == [[4.0, 2.0, 3.0, 4.0]]
    assert changed(0) == [[3.0, 2.0, 4.0, 4.0]]
    assert logits.tolist() == [[4.0, 4.0, 4.0, 4.0]]


tokens = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=6)
penalty = st.sampled_from([-0.3, 0.0, 0.7])
rows = st.lists(
    st.tuples(tokens, tokens, st.integers(0, VOCAB_SIZE - 1), st.booleans(), st.sampled_from([0.5, 1.0, 1.3]), penalty),
    min_size=1,
    max_size=5,
)


@settings(max_examples=150, deadline=None)
@given(rows=rows, presence=penalty)
def test_logits_are_the_same_whether_the_newest_token_is_known_or_pending(rows, presence) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(len(rows), VOCAB_SIZE, generator=generator) * 3
    known, waiting = [], []
    for prompt, output, newest, is_pending, repetition, frequency in rows:
        params = drawn(repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence)
        known.append(make_sequence(params, [0, *prompt], [*output, newest]))
        waiting.append(make_sequence(params, [0, *prompt], [*output, PENDING if is_pending else newest]))
    newest_tokens = torch.tensor([row[2] for row in reversed(rows)])
    pending = PendingTokens({s: len(rows) - 1 - i for i, s in enumerate(waiting)}, newest_tokens)
    ahead = [0] * len(rows)
    wanted = LogitChanges().apply(logits, known, ahead, None)
    assert torch.equal(LogitChanges().apply(logits, waiting, ahead, pending), wanted)


def test_a_token_is_counted_once_when_it_becomes_known() -> None:
    logits, changes = torch.zeros(1, VOCAB_SIZE), LogitChanges()
    sequence = make_sequence(drawn(frequency_penalty=1.0), [0], [1, PENDING])
    changes.apply(logits, [sequence], [0], PendingTokens({sequence: 0}, torch.tensor([1])))
    sequence.token_ids[-1] = 1
    assert changes.apply(logits, [sequence], [0], None)[0, 1] == pytest.approx(-2.0)
