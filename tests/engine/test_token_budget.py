"""What a step may hold after memory ran out."""

import pytest

from pagedd.engine.step import ScheduledSequence, Step
from pagedd.engine.token_budget import LEAST_TOKENS, TokenBudget


def step(*num_tokens: int) -> Step:
    return Step(0, [ScheduledSequence(None, 0, count) for count in num_tokens])  # type: ignore[arg-type]


def after_calm(budget: TokenBudget, num_steps: int) -> tuple[int, int]:
    for _ in range(num_steps):
        budget.note_step()
    return budget.chunk_tokens, budget.num_decodes


def test_chunks_have_half_of_what_was_too_much_until_steps_have_been_calm_for_long() -> None:
    budget = TokenBudget(512, 8)
    budget.shrink(step(1, 1, 400))
    assert (budget.tokens, budget.chunk_tokens, budget.num_decodes) == (512, 200, 8)
    assert after_calm(budget, 255) == (200, 8)
    assert after_calm(budget, 1) == (400, 8)
    assert after_calm(budget, 256) == (512, 8)
    assert after_calm(budget, 1000) == (512, 8)


def test_a_later_shortage_shrinks_them_further_but_never_to_nothing() -> None:
    budget = TokenBudget(512, 8)
    budget.shrink(step(400))
    after_calm(budget, 255)
    budget.shrink(step(150))
    assert budget.chunk_tokens == 75
    assert after_calm(budget, 255) == (75, 8)
    budget.shrink(step(2))
    assert budget.chunk_tokens == LEAST_TOKENS


def test_what_is_left_is_bounded_by_the_step_and_by_what_chunks_may_have() -> None:
    budget = TokenBudget(512, 8)
    assert budget.left(step(1, 1, 100)) == 410
    budget.shrink(step(300))
    assert budget.left(step(1, 1, 100)) == 50
    assert TokenBudget(10, 8).left(step(1, 1, 4)) == 4


def test_where_decodes_alone_are_too_much_half_of_them_go_into_a_step_in_turn() -> None:
    budget = TokenBudget(512, 8)
    budget.shrink(step(1, 1, 1, 1, 1))
    assert (budget.chunk_tokens, budget.num_decodes) == (512, 2)
    decoding = list("abcde")
    turns = ["".join(budget.in_turn(decoding)) for _ in range(5)]  # type: ignore[arg-type]
    assert turns == ["ab", "cd", "ea", "bc", "de"]
    assert budget.in_turn(decoding[:2]) == ["a", "b"]  # type: ignore[arg-type]
    assert after_calm(budget, 256) == (512, 4)


@pytest.mark.parametrize("num_decodes", [1, 2])
def test_one_decode_always_goes(num_decodes: int) -> None:
    budget = TokenBudget(512, 8)
    for _ in range(3):
        budget.shrink(step(*[1] * num_decodes))
    assert budget.num_decodes == 1


def test_decodes_give_way_beside_a_chunk_that_has_the_least_already() -> None:
    budget = TokenBudget(512, 8)
    for _ in range(6):
        budget.shrink(step(1, 1, 1, 1, 1, 1, budget.chunk_tokens))
    assert (budget.chunk_tokens, budget.num_decodes) == (LEAST_TOKENS, 3)
    budget.shrink(step(LEAST_TOKENS))
    assert budget.num_decodes == 1


def test_a_paced_engine_computes_small_chunks() -> None:
    budget = TokenBudget(512, 8)
    budget.pace(400)
    assert (budget.for_chunks, budget.left(step())) == (100, 100)
    budget.pace(1)
    assert budget.for_chunks == LEAST_TOKENS
    budget.pace(None)
    assert budget.for_chunks == 512
