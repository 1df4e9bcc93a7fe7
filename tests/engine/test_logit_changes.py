"""Penalties over a token that only the device knows. What each change means is held in `test_sampler.py`."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedd.engine.draw import PendingTokens
from pagedd.engine.logit_changes import LogitChanges
from pagedd.engine.request import Request
from pagedd.engine.sampling_params import SamplingParams
from pagedd.engine.sequence import PENDING, Sequence

VOCAB_SIZE = 8


def make_sequence(prompt: list[int], output: list[int], **params: float) -> Sequence:
    return Sequence(
        request=Request(request_id="r", prompt_token_ids=prompt, params=SamplingParams(max_tokens=99, **params)),
        choice_index=0,
        token_ids=prompt + output,
        num_prompt_tokens=len(prompt),
        arrival_s=0.0,
        due_s=0.0,
        order=0,
        priority=0,
    )


def test_a_pending_token_counts_as_one_more_of_its_kind() -> None:
    logits = torch.tensor([[4.0, 4.0, 4.0, 4.0]])
    sequence = make_sequence([0], [1, 1, PENDING], frequency_penalty=1.0)

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
        params = {"repetition_penalty": repetition, "frequency_penalty": frequency, "presence_penalty": presence}
        known.append(make_sequence([0, *prompt], [*output, newest], **params))
        waiting.append(make_sequence([0, *prompt], [*output, PENDING if is_pending else newest], **params))
    newest_tokens = torch.tensor([row[2] for row in reversed(rows)])
    pending = PendingTokens({s: len(rows) - 1 - i for i, s in enumerate(waiting)}, newest_tokens)
    ahead = [0] * len(rows)
    wanted = LogitChanges().apply(logits, known, ahead, None)
    assert torch.equal(LogitChanges().apply(logits, waiting, ahead, pending), wanted)


def test_a_token_is_counted_once_when_it_becomes_known() -> None:
    logits, changes = torch.zeros(1, VOCAB_SIZE), LogitChanges()
    sequence = make_sequence([0], [1, PENDING], presence_penalty=0.0, frequency_penalty=1.0)
    changes.apply(logits, [sequence], [0], PendingTokens({sequence: 0}, torch.tensor([1])))
    sequence.token_ids[-1] = 1
    assert changes.apply(logits, [sequence], [0], None)[0, 1] == pytest.approx(-2.0)
