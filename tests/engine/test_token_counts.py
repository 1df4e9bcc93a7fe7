"""Counts of a live sequence's tokens: right after every step, cheap to keep, gone with the sequence."""

import gc
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pagedd.engine.request import Request
from pagedd.engine.sampling_params import SamplingParams
from pagedd.engine.sequence import Sequence
from pagedd.engine.token_counts import TokenCounts


def make_sequence(prompt: list[int], output: list[int] | None = None, choice_index: int = 0) -> Sequence:
    return Sequence(
        request=Request(request_id="r", prompt_token_ids=prompt, params=SamplingParams(max_tokens=100)),
        choice_index=choice_index,
        token_ids=prompt + (output or []),
        num_prompt_tokens=len(prompt),
        arrival_s=0.0,
        due_s=0.0,
        order=0,
        priority=0,
    )


def counts_of(counts: TokenCounts, sequence: Sequence) -> dict[int, int]:
    token_ids, output_counts = counts.of(sequence)
    return dict(zip(token_ids.tolist(), output_counts.tolist(), strict=True))


def test_prompt_tokens_count_zero_until_they_are_produced():
    counts = TokenCounts()
    sequence = make_sequence([5, 5, 7])
    assert counts_of(counts, sequence) == {5: 0, 7: 0}
    sequence.token_ids += [7, 9, 7]
    assert counts_of(counts, sequence) == {5: 0, 7: 2, 9: 1}


def test_asking_twice_counts_nothing_twice():
    counts = TokenCounts()
    sequence = make_sequence([1], [2, 2])
    assert counts_of(counts, sequence) == counts_of(counts, sequence) == {1: 0, 2: 2}


def test_a_fork_has_its_own_counts():
    counts = TokenCounts()
    first, second = make_sequence([1, 2], choice_index=0), make_sequence([1, 2], choice_index=1)
    first.token_ids.append(3)
    second.token_ids.append(1)
    assert counts_of(counts, first) == {1: 0, 2: 0, 3: 1}
    assert counts_of(counts, second) == {1: 1, 2: 0}


def test_counts_go_when_the_sequence_goes():
    counts = TokenCounts()
    sequences = [make_sequence([1, 2, 3]) for _ in range(50)]
    for sequence in sequences:
        counts.of(sequence)
    assert len(counts) == 50
    del sequence, sequences
    gc.collect()
    assert len(counts) == 0


class CountedReads(list[int]):
    """A list of tokens that knows how many of them were handed out."""

    reads = 0

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        item = super().__getitem__(index)
        self.reads += len(item) if isinstance(index, slice) else 1
        return item

    def __iter__(self):  # type: ignore[no-untyped-def]
        self.reads += len(self)
        return super().__iter__()


def test_every_token_is_read_once_however_long_the_sequence_gets():
    counts = TokenCounts()
    sequence = make_sequence(list(range(1000)))
    sequence.token_ids = tokens = CountedReads(sequence.token_ids)
    for step in range(500):
        counts.of(sequence)
        tokens.append(step % 7)
    assert tokens.reads == 1000 + 499


@given(st.lists(st.integers(0, 20), min_size=1), st.lists(st.lists(st.integers(0, 40), max_size=40), max_size=8))
def test_counts_equal_a_recount_after_any_growth(prompt: list[int], growth: list[list[int]]):
    counts = TokenCounts()
    sequence = make_sequence(prompt)
    for new_tokens in growth:
        sequence.token_ids += new_tokens
        expected = Counter(sequence.output_token_ids)
        assert counts_of(counts, sequence) == {t: expected[t] for t in set(sequence.token_ids)}
