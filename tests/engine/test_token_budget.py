"""The budget of a step after memory ran out."""

from pagedd.engine.token_budget import LEAST_TOKENS, TokenBudget


def after_calm(budget: TokenBudget, num_steps: int) -> int:
    for _ in range(num_steps):
        budget.note_step()
    return budget.tokens


def test_half_of_what_was_too_much_must_do_until_steps_have_been_calm_for_long() -> None:
    budget = TokenBudget(512)
    budget.shrink(400)
    assert budget.tokens == 200
    assert after_calm(budget, 255) == 200
    assert after_calm(budget, 1) == 400
    assert after_calm(budget, 256) == 512
    assert after_calm(budget, 1000) == 512


def test_a_later_shortage_shrinks_it_further_but_never_to_nothing() -> None:
    budget = TokenBudget(512)
    budget.shrink(400)
    after_calm(budget, 255)
    budget.shrink(150)
    assert budget.tokens == 75
    assert after_calm(budget, 255) == 75
    budget.shrink(1)
    assert budget.tokens == LEAST_TOKENS
