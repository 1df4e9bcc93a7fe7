"""Top-k and top-p in Triton against those over torch operations, to the last token."""

import pytest
import torch

from pagedd.kernels import torch_ops
from pagedd.kernels.token_draw import _weights
from pagedd.kernels.triton.top_k_top_p import keep_best


def expect_same(logits: torch.Tensor, limits: list[int], shares: list[float], temperature: float = 1.0) -> torch.Tensor:
    """The weights that are left over."""
    weights = _weights(logits, torch.full((len(logits),), temperature))
    expected, bounds = weights.clone(), (torch.tensor(limits), torch.tensor(shares, dtype=torch.float64))
    torch_ops.keep_best(logits, expected, *bounds)
    keep_best(logits, weights, *bounds)
    assert torch.equal(weights, expected)
    return weights


@pytest.mark.parametrize("vocab_size", [1, 2, 100, 5000])
@pytest.mark.parametrize("temperature", [0.2, 1.0, 5.0])
def test_rows_of_different_limits_and_shares_are_cut_each_by_its_own(vocab_size: int, temperature: float) -> None:
    limits = [min(limit, vocab_size) for limit in (vocab_size, 1, 7, 50, vocab_size, 40, vocab_size, 3000)]
    shares = [1.0, 1.0, 1.0, 0.9, 0.95, 0.01, 1e-9, 0.999999]
    expect_same(torch.randn(8, vocab_size) * 4, limits, shares, temperature)


@pytest.mark.parametrize("num_levels", [1, 2, 5, 300])
def test_ties_are_kept_by_ascending_id(num_levels: int) -> None:
    logits = torch.randint(0, num_levels, (6, 9000)).float() / 3 - 1
    expect_same(logits, [1, 10, 5000, 9000, 9000, 8999], [1.0, 0.5, 0.7, 0.5, 0.99, 1.0])


def test_equal_logits_lose_their_highest_ids_first() -> None:
    weights = expect_same(torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]]), [3], [0.6])
    assert (weights > 0).tolist() == [[False, True, True, False, False]]


def test_negative_zero_is_tied_with_zero() -> None:
    weights = expect_same(torch.tensor([[-0.0, 0.0, -0.0, 0.0]]), [2], [1.0])
    assert (weights > 0).tolist() == [[True, True, False, False]]


def test_banned_tokens_stay_out_and_one_token_is_always_left() -> None:
    logits = torch.randn(3, 100)
    logits[:, 1:] = float("-inf")
    logits[1, 50] = 3.4e38
    logits[2, :50] = -3.4e38
    weights = expect_same(logits, [100, 2, 60], [0.5, 0.5, 0.0])
    assert (weights > 0).sum(dim=1).tolist() == [1, 1, 1]


def test_weights_whose_sum_passes_53_bits_are_summed_exactly() -> None:
    expect_same(torch.zeros(2, 20_000), [20_000, 20_000], [0.5, 1 - 2**-40])


@pytest.mark.parametrize("spoilt", [float("nan"), float("inf")])
def test_a_broken_row_ends_and_leaves_its_neighbours_alone(spoilt: float) -> None:
    logits = torch.randn(3, 500)
    bounds = torch.tensor([5] * 3), torch.full((3,), 0.9, dtype=torch.float64)
    expected = _weights(logits, torch.ones(3))
    torch_ops.keep_best(logits, expected, *bounds)
    logits[1, 77] = spoilt
    weights = _weights(logits, torch.ones(3))
    keep_best(logits, weights, *bounds)
    assert torch.equal(weights[::2], expected[::2])


@pytest.mark.kernels
@pytest.mark.parametrize("seed", range(4))
def test_a_whole_vocabulary_under_random_limits_and_shares(seed: int) -> None:
    torch.manual_seed(seed)
    logits = (torch.randn(4, 128_256) * 3).bfloat16().float()  # as a model gives them: full of ties
    limits = torch.randint(1, 128_257, (4,)).tolist()
    expect_same(logits, [*limits[:2], 50, 128_256], torch.rand(4).tolist())


@pytest.mark.parametrize("which", ["logits", "weights"])
def test_rows_that_do_not_lie_together_are_refused(which: str) -> None:
    tables = {"logits": torch.zeros(2, 8), "weights": torch.ones(2, 8, dtype=torch.int64)}
    tables[which] = torch.cat([tables[which], tables[which]], dim=1)[:, :8]
    with pytest.raises(ValueError, match=rf"{which} of \[2, 8\] have strides \(16, 1\)"):
        keep_best(*tables.values(), torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.float64))
