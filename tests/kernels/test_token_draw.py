"""Draws in C++ against the torch operations, and what no row may do to whoever calls."""

import math
from unittest.mock import patch

import numpy as np
import pytest
import torch

from pagedd.kernels import cpu, token_draw
from pagedd.kernels.token_draw import ONE, Choices

NAN, INF = math.nan, math.inf


def choices(num_rows: int, draw: float | list[float], **changes: float) -> Choices:
    def column(value: object, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(value, dtype=dtype).expand(num_rows).contiguous()

    fields = {"temperature": 1.0, "limit": 1 << 40, "share": 1.0, "floor": 0.0} | changes
    return Choices(
        temperatures=column(fields["temperature"], torch.float32),
        limits=column(fields["limit"], torch.int64),
        shares=column(fields["share"], torch.float64),
        floors=column(int(fields["floor"] * ONE), torch.int64),
        draws=column(draw, torch.float64),
        is_limited=fields["limit"] < 1 << 40 or fields["share"] < 1,
        has_floors=fields["floor"] > 0,
    )


def both_ways(logits: torch.Tensor, how: Choices) -> tuple[list[int], list[int]]:
    """Tokens by C++ and by torch."""
    cpu.load()
    in_cpp = token_draw.draw_tokens(logits, how).tolist()
    with patch.object(cpu, "loaded", lambda: None):
        return in_cpp, token_draw.draw_tokens(logits, how).tolist()


def test_the_draw_is_the_first_token_whose_cumulative_weight_exceeds_it() -> None:
    logits = torch.tensor([[0.0, 1.0, 0.0, 3.0, 0.0]]).log()  # -inf, and weights 1 to 3
    for draw, token in ((0.0, 1), (0.2499, 1), (0.2501, 3), (1 - 2**-53, 3)):
        assert both_ways(logits, choices(1, draw)) == ([token], [token])


@pytest.mark.parametrize("vocab_size", [1, 15, 16, 17, 1024, 5003])
@pytest.mark.parametrize(
    "changes",
    [{}, {"limit": 1}, {"limit": 7, "share": 0.5}, {"share": 1e-9}, {"share": 0.95, "floor": 0.01}, {"floor": 1.0}],
)
def test_vocabularies_of_any_size_are_drawn_from_as_by_torch(vocab_size: int, changes: dict[str, float]) -> None:
    logits = torch.randn(64, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 4
    draws = torch.rand(64, generator=torch.Generator().manual_seed(1), dtype=torch.float64).tolist()
    in_cpp, by_torch = both_ways(logits, choices(64, draws, **changes))
    # Another exponential: a draw that lies between two tokens to the sixth digit may fall to either.
    assert sum(a != b for a, b in zip(in_cpp, by_torch, strict=True)) <= 1


def test_equal_logits_are_kept_by_their_ids() -> None:
    logits = torch.zeros(1, 100)
    for draw, token in ((0.0, 0), (0.34, 1), (0.99, 2)):
        assert both_ways(logits, choices(1, draw, limit=3)) == ([token], [token])
        assert both_ways(logits, choices(1, draw, share=0.03)) == ([token], [token])


@pytest.mark.parametrize("temperature", [1e-45, 1e-6, 1e30])
def test_temperatures_at_the_ends_of_what_a_float_holds_are_the_best_token_or_any(temperature: float) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -INF]])
    in_cpp, by_torch = both_ways(logits.repeat(3, 1), choices(3, [0.0, 0.5, 0.99], temperature=temperature, limit=4))
    assert in_cpp == by_torch == ([0, 1, 2] if temperature > 1 else [1, 1, 1])


@pytest.mark.parametrize("changes", [{}, {"limit": 3}, {"share": 0.5}, {"floor": 0.5}, {"limit": 3, "share": 0.5}])
@pytest.mark.parametrize("broken", [[NAN], [INF], [-INF], [NAN, INF, -INF, 1.0], [NAN, 1.0], [INF, 1.0]])
def test_a_row_that_is_no_numbers_gives_a_token_in_range_and_leaves_the_others_alone(
    broken: list[float], changes: dict[str, float]
) -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(5))
    sound = token_draw.draw_tokens(logits, choices(3, 0.7, **changes))
    logits[1] = torch.tensor((broken * 40)[:40])
    tokens, _ = both_ways(logits, choices(3, 0.7, **changes))
    assert (tokens[0], tokens[2]) == (sound[0], sound[2])
    assert 0 <= tokens[1] < 40


def test_rows_of_a_wider_table_are_read_where_they_lie() -> None:
    wide = torch.randn(4, 64, generator=torch.Generator().manual_seed(2))
    wide[:, 50:] = 100.0
    how = choices(4, [0.1, 0.4, 0.6, 0.9], share=0.9)
    assert both_ways(wide[:, :50], how)[0] == both_ways(wide[:, :50].contiguous(), how)[0]


@pytest.mark.parametrize("width", [0, 1, 5, 100])
@pytest.mark.parametrize("spread", [0.0, 1.0, 50.0])
def test_the_best_tokens_are_ranked_as_by_torch(width: int, spread: float) -> None:
    logits = (torch.randn(9, 100, generator=torch.Generator().manual_seed(3)) * spread).round()
    cpu.load()
    ids, normalizers = token_draw.rank_tokens(logits, width)
    assert ids.tolist() == [np.lexsort((np.arange(100), -row))[:width].tolist() for row in logits.numpy()]
    torch.testing.assert_close(normalizers, logits.double().logsumexp(dim=1, keepdim=True).float())


@pytest.mark.parametrize("broken", [NAN, INF, -INF])
def test_a_row_that_is_no_numbers_has_no_best_tokens_and_ids_in_range(broken: float) -> None:
    cpu.load()
    ids, _ = token_draw.rank_tokens(torch.full((2, 40), broken), 3)
    assert ((ids >= 0) & (ids < 40)).all()


def test_what_does_not_fit_together_is_refused() -> None:
    extension = cpu.load()
    with pytest.raises(RuntimeError, match="a choice for each of 2 rows is expected"):
        token_draw.draw_tokens(torch.zeros(2, 4), choices(3, 0.5))
    with pytest.raises(RuntimeError, match="rows of float32 on the CPU are expected"):
        token_draw.draw_tokens(torch.zeros(2, 4, dtype=torch.float64), choices(2, 0.5))
    with pytest.raises(RuntimeError, match="width 5: 0 to the vocabulary's 4 are expected"):
        extension.rank_tokens(torch.zeros(2, 4), 5)
