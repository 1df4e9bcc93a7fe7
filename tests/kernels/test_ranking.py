"""Top-k and top-p over torch operations against the specification."""

import pytest
import torch

from pagedd.kernels import reference
from pagedd.kernels.ranking import best_first, best_tokens, keep_best, rank_keys, token_ids


@pytest.mark.parametrize("num_levels", [1, 3, 1000])
@pytest.mark.parametrize("vocab_size", [1, 7, 2000])
def test_what_is_kept_equals_the_reference(vocab_size, num_levels) -> None:
    generator = torch.Generator().manual_seed(vocab_size + num_levels)
    logits = torch.randint(0, num_levels, (6, vocab_size), generator=generator).float() / 50
    weights = ((logits - logits.amax(dim=1, keepdim=True)).exp() * 2**40).long()
    limits = torch.tensor([1, 2, vocab_size, vocab_size, 5, vocab_size]).clamp(max=vocab_size)
    shares = torch.tensor([1.0, 0.5, 0.9, 1e-9, 0.3, 1.0], dtype=torch.float64)
    expected = weights.clone()
    reference.keep_best(logits, expected, limits, shares)
    keep_best(logits, weights, limits, shares)
    assert torch.equal(weights, expected)


def test_the_best_come_first_and_of_equals_the_lowest_id() -> None:
    keys = rank_keys(torch.tensor([[1.0, 3.0, -0.0, 3.0, 0.0]]))
    assert token_ids(best_first(keys, 5), 5).tolist() == [[1, 3, 0, 2, 4]]


def test_the_best_token_is_the_lowest_among_equals_or_the_first_that_is_no_number() -> None:
    nan = float("nan")
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [nan, 1.0, nan, 9.0], [1.0, nan, nan, 9.0], [-torch.inf] * 4])
    assert best_tokens(logits).tolist() == [1, 0, 1, 0]
    assert best_tokens(logits.T.contiguous().T).tolist() == [1, 0, 1, 0]
    assert logits.argmax(dim=1).tolist() == [1, 0, 1, 0]  # what a device's own search gives
