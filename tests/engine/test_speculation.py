"""Guesses from a sequence's own text: what is guessed, how much, and that nobody can tell from the answer."""

import pytest

from pagedd.engine.request import Request
from pagedd.engine.sampling_params import SamplingParams
from pagedd.engine.sequence import Sequence
from pagedd.engine.speculation import PromptLookup
from pagedd.engine.step import Sampled


def sequence(token_ids: list[int], **params) -> Sequence:
    request = Request(request_id="a", prompt_token_ids=token_ids, params=SamplingParams(max_tokens=50, **params))
    return Sequence(
        request=request,
        choice_index=0,
        token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids),
        arrival_s=0.0,
        due_s=0.0,
        order=0,
        priority=0,
    )


def test_what_followed_the_same_three_tokens_last_is_guessed() -> None:
    text = sequence([1, 2, 3, 4, 5, 9, 2, 3, 7, 8, 1, 2, 3])
    assert PromptLookup(7).propose(text, 10, 1) == [4, 5, 9]  # not 7, 8 behind the later pair


def test_a_pair_is_enough_when_no_three_agree() -> None:
    assert PromptLookup(7).propose(sequence([1, 2, 3, 4, 5, 6, 2, 3]), 10, 1) == [4, 5, 6]


def test_a_loop_goes_on_into_the_guess() -> None:
    assert PromptLookup(7).propose(sequence([5, 6, 5, 6, 5]), 10, 1) == [6, 5, 6]


def test_nothing_is_guessed_without_precedent_room_or_leave() -> None:
    assert PromptLookup(7).propose(sequence([1, 2, 3, 4]), 10, 1) == []
    assert PromptLookup(7).propose(sequence([1]), 10, 1) == []
    assert PromptLookup(7).propose(sequence([5, 6, 5, 6]), 0, 1) == []
    assert PromptLookup(0).propose(sequence([5, 6, 5, 6]), 10, 1) == []
    assert PromptLookup(7).propose(sequence([5, 6, 5, 6], presence_penalty=1.0), 10, 1) == []


def test_guesses_that_come_true_grow_and_those_that_fail_shrink_to_a_pause() -> None:
    lookup, text = PromptLookup(7), sequence([5, 6] * 6)
    assert len(lookup.propose(text, 10, 1)) == 3
    lookup.learn(text, 3, 3)
    assert len(lookup.propose(text, 10, 1)) == 7
    for num_drafted, expected in ((7, 3), (3, 1)):
        lookup.learn(text, num_drafted, 0)
        assert len(lookup.propose(text, 10, 1)) == expected
    lookup.learn(text, 1, 0)
    assert lookup.propose(text, 10, 1) == []
    text.token_ids += [5, 6] * 8
    assert len(lookup.propose(text, 10, 1)) == 1


def test_draws_count_as_far_as_each_guess_before_them_was_right() -> None:
    lookup, text = PromptLookup(7), sequence([5, 6] * 6)
    draft = lookup.propose(text, 10, 1)
    assert draft == [5, 6, 5]
    for drawn, num_counting in (([5, 6, 5, 9], 4), ([5, 6, 9, 9], 3), ([7, 6, 5, 9], 1)):
        assert lookup.verify(text, draft, [Sampled(token_id) for token_id in drawn]) == [
            Sampled(token_id) for token_id in drawn[:num_counting]
        ]


def test_a_broken_draw_behind_a_right_guess_counts_as_little_as_one_behind_a_wrong_guess() -> None:
    lookup, text = PromptLookup(7), sequence([5, 6] * 6)
    draft = lookup.propose(text, 10, 1)
    draws = [Sampled(5), Sampled(6), Sampled(0, error_code="nan_logits"), Sampled(6)]
    assert lookup.verify(text, draft, draws) == draws[:2]
    assert lookup.propose(text, 10, 1)
    assert lookup.verify(text, draft, draws[2:] + draws[:2]) == []
    assert lookup.propose(text, 10, 1) == []


@pytest.mark.parametrize("num_guesses", [1, 3, 7])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 9, 40])
def test_answers_are_those_of_one_token_a_step(bench, cold, num_guesses, max_tokens) -> None:
    b = bench(num_blocks=20, num_speculative_tokens=num_guesses)
    b.add("a", [3, 4, 5, 3, 4], max_tokens=max_tokens)
    b.run()
    assert b.output("a") == cold([3, 4, 5, 3, 4], max_tokens)
    assert b.blocks.pool.num_used == 0


def test_a_text_that_loops_takes_fewer_steps_than_tokens(bench, cold) -> None:
    b = bench(num_blocks=20, num_speculative_tokens=7)
    b.add("a", [3, 4, 5], max_tokens=60)
    b.run()
    counters = b.scheduler.counters
    assert b.output("a") == cold([3, 4, 5], 60)
    assert counters.accepted_tokens > 20
    assert counters.steps < 45


def test_an_engine_that_has_to_keep_a_pace_guesses_nothing(bench, cold) -> None:
    b = bench(num_blocks=20, num_speculative_tokens=7)
    b.scheduler.budget.pace(100.0)
    b.add("a", [3, 4, 5], max_tokens=60)
    b.run()
    assert b.output("a") == cold([3, 4, 5], 60)
    assert b.scheduler.counters.steps == 60


def test_a_stop_token_inside_a_guess_ends_the_answer_there(bench, cold) -> None:
    expected = cold([3, 4, 5], 60)
    stop = expected[-1]
    b = bench(num_blocks=20, num_speculative_tokens=7)
    b.add("a", [3, 4, 5], max_tokens=60, stop_token_ids=(stop,), min_tokens=40)
    b.run()
    cut = expected.index(stop, 40) + 1
    assert b.output("a") == expected[:cut]


def test_in_company_one_token_is_guessed_until_a_guess_has_come_true() -> None:
    lookup, text = PromptLookup(7), sequence([5, 6, 7] * 4)
    for num_drafted in (1, 3, 7, 7):
        assert len(lookup.propose(text, 10, 3)) == num_drafted
        lookup.learn(text, num_drafted, num_drafted)
    lookup.learn(text, 7, 5)
    assert len(lookup.propose(text, 10, 3)) == 1
    assert len(lookup.propose(text, 10, 2)) == 7


def test_in_company_a_pair_of_tokens_is_no_precedent() -> None:
    text = sequence([1, 2, 3, 4, 5, 6, 2, 3])
    assert PromptLookup(7).propose(text, 10, 2) == [4, 5, 6]
    assert PromptLookup(7).propose(text, 10, 3) == []


def test_a_full_batch_of_loops_takes_fewer_steps_than_tokens(bench, cold) -> None:
    b = bench(num_blocks=60, num_speculative_tokens=7)
    for name in "abc":
        b.add(name, [3, 4, 5], max_tokens=60)
    b.run()
    assert all(b.output(name) == cold([3, 4, 5], 60) for name in "abc")
    counters = b.scheduler.counters
    assert counters.accepted_tokens > 60
    assert counters.steps < 45


def test_guesses_leave_everybody_a_token_and_prompts_half_of_the_rest(bench) -> None:
    b = bench(num_blocks=200, num_speculative_tokens=7, max_num_batched_tokens=12)
    for name in "abcd":
        b.add(name, [3, 4, 5], max_tokens=60)
    most = 0
    while b.scheduler.has_work:
        step = b.step()
        num_decodes = sum(item.start >= item.sequence.num_prompt_tokens for item in step.scheduled)
        num_guesses = sum(len(item.draft_token_ids) for item in step.scheduled)
        assert num_guesses <= (12 - num_decodes) // 2
        most = max(most, num_guesses)
    assert most > 0


@pytest.mark.parametrize("num_blocks", [6, 7, 8, 9, 10])
def test_guesses_take_no_block_that_another_needs(bench, cold, num_blocks) -> None:
    """However tight the pool, nobody is preempted and nobody sits out a step because of them."""
    counts = []
    for num_guesses in (0, 7):
        b = bench(num_blocks=num_blocks, num_speculative_tokens=num_guesses)
        for name in "ab":
            b.add(name, [3, 4, 5, 3], max_tokens=16)
        num_left_out = 0
        while b.scheduler.has_work:
            decoding = {s.order for s in b.scheduler.running if s.is_decoding}
            num_left_out += len(decoding - {item.sequence.order for item in b.step().scheduled})
        assert b.output("a") == b.output("b") == cold([3, 4, 5, 3], 16)
        counts.append((b.scheduler.counters.preemptions, num_left_out))
    assert counts[1] <= counts[0]


def test_guesses_are_shared_out_evenly(bench) -> None:
    b = bench(num_blocks=400, num_speculative_tokens=40, max_num_batched_tokens=40, max_model_len=256)
    for name in "abcd":
        b.add(name, [3, 4, 5], max_tokens=200)
    widest = 0
    while b.scheduler.has_work:
        drafts = [len(item.draft_token_ids) for item in b.step().scheduled]
        if len(drafts) == 4 and min(drafts) > 1:
            widest = max(widest, *drafts)
            assert max(drafts) <= 5  # half of 36, for four
    assert widest > 1


def test_a_long_history_is_looked_up_in_its_latest_part() -> None:
    lookup, text = PromptLookup(7), sequence([1, 2, 3, *range(100, 3000), 1, 2, 3])
    assert lookup.propose(text, 10, 1) == []
    text.token_ids += [2999, 1, 2, 3]
    assert lookup.propose(text, 10, 1) == [2999, 1, 2]


def test_a_guess_that_breaks_the_logits_costs_a_step_and_no_answer(bench, cold) -> None:
    b = bench(num_blocks=20, num_speculative_tokens=7)
    b.add("a", [3, 4, 5], max_tokens=60)
    run, num_broken = b.runner.run, 0

    def run_broken(step):
        nonlocal num_broken
        drawn = run(step)
        if any(item.draft_token_ids for item in step.scheduled):
            num_broken += 1
            return [Sampled(0, error_code="nan_logits") for _ in drawn]
        return drawn

    b.runner.run = run_broken
    b.run()
    assert num_broken == 1
    assert b.output("a") == cold([3, 4, 5], 60)
