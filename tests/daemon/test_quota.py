"""What one caller may still have: in flight, in a minute, of the pool. Sixty tokens a minute are one a second."""

import itertools
from collections.abc import Callable

import pytest

from pagedd.client.errors import PageddError
from pagedd.daemon.quota import Allowance, Hold, Need, QuotaRefusal, least_need_of, need_of
from pagedd.daemon.quota_config import QuotaLimits

POOL = 100


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def allowance(clock: Clock, **limits: object) -> Allowance:
    return Allowance(QuotaLimits(**limits), clock)  # type: ignore[arg-type]


def held(allowance: Allowance, tokens: int, choices: int = 1) -> Hold:
    hold = Hold()
    allowance.hold([(hold, Need(choices, tokens, tokens))], POOL)
    return hold


def refusal(ask: Callable[[], object]) -> QuotaRefusal:
    with pytest.raises(PageddError) as caught:
        ask()
    assert isinstance(caught.value, QuotaRefusal)
    return caught.value


def test_without_limits_nothing_is_refused(clock: Clock) -> None:
    free = allowance(clock)
    held(free, 10**9, 1000)
    assert free.tokens_left is None
    assert free.most_tokens(1, POOL) == POOL + 1


def test_a_request_over_the_number_in_flight_may_come_again_when_one_has_ended(clock: Clock) -> None:
    two = allowance(clock, max_requests=2)
    first = held(two, 5)
    held(two, 5)
    refused = refusal(lambda: held(two, 5))
    assert (refused.code, refused.limit, refused.retry_after_s) == ("over_quota", "requests", 1.0)
    assert refused.message == "2 in flight and 1 came, limit 2; try again in 1 s"
    two.release(first, 5)
    held(two, 5)


def test_every_choice_counts(clock: Clock) -> None:
    two = allowance(clock, max_requests=2)
    held(two, 5, choices=2)
    assert refusal(lambda: held(two, 5)).limit == "requests"


def test_the_bucket_says_truly_when_it_will_have_refilled(clock: Clock) -> None:
    sixty = allowance(clock, tokens_per_minute=60)
    held(sixty, 50)
    refused = refusal(lambda: held(sixty, 20))
    assert (refused.code, refused.limit) == ("over_quota", "tokens")
    assert refused.message == "20 tokens needed, 10 left of 60 a minute; try again in 10 s"
    assert refused.retry_after_s == 10.0
    clock.now_s += 9.9
    refusal(lambda: held(sixty, 20))
    clock.now_s += 0.1
    held(sixty, 20)


def test_over_many_minutes_nobody_gets_more_than_the_rate_and_one_bucket(clock: Clock) -> None:
    sixty = allowance(clock, tokens_per_minute=60)
    taken = 0
    for _ in range(6000):  # ten minutes, ten attempts a second
        try:
            sixty.release(held(sixty, 7), 7)
        except PageddError:
            pass
        else:
            taken += 7
        clock.now_s += 0.1
    assert 590 < taken <= 600 + 60


def test_what_a_request_did_not_use_is_given_back_once(clock: Clock) -> None:
    sixty = allowance(clock, tokens_per_minute=60)
    hold = held(sixty, 60)
    sixty.release(hold, 15)
    sixty.release(hold, 15)
    assert sixty.tokens_left == 45
    assert (sixty.num_choices, sixty.num_tokens) == (0, 0)


def test_giving_back_never_makes_more_than_a_minute_s_worth(clock: Clock) -> None:
    sixty = allowance(clock, tokens_per_minute=60)
    hold = held(sixty, 60)
    clock.now_s += 60
    sixty.release(hold, 0)
    assert sixty.tokens_left == 60


def test_the_share_of_the_pool_is_held_until_the_end(clock: Clock) -> None:
    half = allowance(clock, kv_share=0.5)
    hold = held(half, 40)
    refused = refusal(lambda: held(half, 11))
    assert (refused.limit, refused.retry_after_s) == ("kv", 1.0)
    assert refused.message.startswith("40 tokens in flight and 11 came, limit 50 of the KV pool")
    half.release(hold, 40)
    held(half, 50)


@pytest.mark.parametrize(
    ("prompt", "choices", "output", "num_blocks"),
    [
        (1, 1, 16, 1),
        (16, 3, 1, 1),
        (17, 1, 16, 2),
        (17, 1, 17, 3),
        (17, 2, 16, 3),
        (17, 2, 18, 5),
        (16, 3, 17, 4),
        (15, 4, 3, 8),
        (3, 4, 1, 4),
    ],
)
def test_choices_need_the_prompts_full_blocks_once_and_each_a_tail_of_its_own(
    prompt: int, choices: int, output: int, num_blocks: int
) -> None:
    assert need_of(prompt, choices, output, 16) == (choices, prompt + choices * output, 16 * num_blocks)


def test_before_the_prompt_is_counted_no_more_is_held_than_it_may_come_to_need() -> None:
    for choices, prompt, output in itertools.product((1, 2, 5), range(1, 40), range(1, 20)):
        least = least_need_of(prompt, choices, output, 8)
        needs = [need_of(longer, choices, output, 8).num_kv_tokens for longer in range(prompt, prompt + 9)]
        assert least.num_kv_tokens == min(needs)


def test_a_share_loses_no_block_to_binary_fractions(clock: Clock) -> None:
    caller = allowance(clock, kv_share=0.29)
    caller.hold([(Hold(), Need(1, 464, 464))], 1600)
    assert caller.most_tokens(3, 1600) == 464 + 3


def test_whoever_may_have_all_of_the_pool_may_fill_it(clock: Clock) -> None:
    caller = allowance(clock, kv_share=1.0)
    assert caller.most_output_tokens(40, 1, 64, 16) == 25
    caller.hold([(Hold(), need_of(40, 1, 25, 16))], 64)


def test_the_share_of_the_pool_is_of_whole_blocks(clock: Clock) -> None:
    quarter, holds = allowance(clock, kv_share=0.25), [Hold() for _ in range(4)]
    for hold, choices in zip(holds, (1, 2, 2), strict=False):  # of a pool of 20 blocks of 16
        quarter.hold([(hold, need_of(1, choices, 1, 16))], 320)
    assert refusal(lambda: quarter.hold([(holds[3], need_of(1, 1, 1, 16))], 320)).limit == "kv"
    assert (quarter.num_tokens, quarter.num_kv_tokens) == (8, 80)
    quarter.release(holds[0], 2)
    quarter.hold([(holds[3], need_of(15, 1, 1, 16))], 320)
    assert quarter.num_kv_tokens == 80


@pytest.mark.parametrize("choices", [1, 2, 3, 6])
def test_the_most_output_that_may_be_fits_and_a_token_more_does_not(clock: Clock, choices: int) -> None:
    caller = allowance(clock, kv_share=0.29)
    for prompt in range(1, 99):
        most = caller.most_output_tokens(prompt, choices, 300, 16)
        assert most is not None
        assert need_of(prompt, choices, max(0, most) + 1, 16).num_kv_tokens > 87
        assert most <= 0 or need_of(prompt, choices, most, 16).num_kv_tokens <= 87


@pytest.mark.parametrize(
    ("limits", "limit", "said"),
    [
        ({"max_requests": 1}, "requests", "needs 2, its caller may have 1"),
        ({"tokens_per_minute": 60}, "tokens", "needs 61, its caller may have 60 tokens a minute"),
        ({"kv_share": 0.6}, "kv", "needs 61, its caller may have 60 tokens of the KV pool"),
    ],
)
def test_what_can_never_fit_is_not_told_to_come_again(
    clock: Clock, limits: dict[str, object], limit: str, said: str
) -> None:
    refused = refusal(lambda: held(allowance(clock, **limits), 61, choices=2))
    assert (refused.code, refused.limit, refused.retry_after_s) == ("exceeds_quota", limit, None)
    assert refused.field == {"requests": "n", "tokens": "max_tokens", "kv": "max_tokens"}[limit]
    assert said in refused.message


def test_what_can_never_fit_is_said_to_be_the_least_before_the_tokens_are_counted(clock: Clock) -> None:
    sixty = allowance(clock, tokens_per_minute=60)
    refused = refusal(lambda: sixty.hold([(Hold(), Need(1, 61, 61))], POOL, most_tokens=1000))
    assert "needs at least 61, its caller may have 60 tokens a minute" in refused.message


def test_the_prompts_of_one_request_are_taken_all_or_none(clock: Clock) -> None:
    sixty = allowance(clock, tokens_per_minute=60, max_requests=9)
    held(sixty, 20)
    holds = [Hold(), Hold()]
    assert refusal(lambda: sixty.hold([(hold, Need(1, 30, 30)) for hold in holds], POOL)).retry_after_s == 20.0
    assert (sixty.num_choices, sixty.tokens_left) == (1, 40)
    assert refusal(lambda: sixty.hold([(hold, Need(1, 31, 31)) for hold in holds], POOL)).code == "exceeds_quota"


def test_a_hold_that_grows_pays_the_difference_and_is_judged_by_the_whole(clock: Clock) -> None:
    sixty = allowance(clock, tokens_per_minute=60)
    held(sixty, 30)
    hold = held(sixty, 10)
    refused = refusal(lambda: sixty.hold([(hold, Need(1, 35, 35))], POOL))
    assert refused.message.startswith("35 tokens needed, 30 left of 60 a minute")
    assert refused.retry_after_s == 5.0  # with the 10 that it gives back
    sixty.hold([(hold, Need(1, 30, 30))], POOL)
    assert sixty.tokens_left == 0


def test_before_the_tokens_are_counted_the_wait_is_for_the_most_that_they_can_be(clock: Clock) -> None:
    sixty = allowance(clock, tokens_per_minute=60)
    held(sixty, 50)
    for most, wait_s in ((25, 15.0), (1000, 50.0)):
        refused = refusal(lambda most=most: sixty.hold([(Hold(), Need(1, 20, 20))], POOL, most_tokens=most))  # type: ignore[misc]
        assert refused.message.startswith("at least 20 tokens needed, 10 left of 60 a minute")
        assert refused.retry_after_s == wait_s


def test_other_limits_leave_what_is_held_and_the_share_that_is_used_as_it_was(clock: Clock) -> None:
    caller = allowance(clock, tokens_per_minute=600)
    hold = held(caller, 150)
    caller.replace(QuotaLimits(tokens_per_minute=60, max_requests=1))
    assert caller.tokens_left == 45
    assert refusal(lambda: held(caller, 5)).limit == "requests"
    caller.release(hold, 0)
    caller.replace(QuotaLimits())
    held(caller, 10**6)


def test_a_lower_limit_locks_nobody_out_for_more_than_a_minute(clock: Clock) -> None:
    caller = allowance(clock, tokens_per_minute=600000)
    caller.release(held(caller, 300000), 300000)
    caller.replace(QuotaLimits(tokens_per_minute=1000))
    assert refusal(lambda: held(caller, 1000)).retry_after_s == 30.0


def test_a_limit_that_is_removed_and_set_again_is_no_full_bucket(clock: Clock) -> None:
    caller = allowance(clock, tokens_per_minute=60)
    caller.release(held(caller, 60), 60)
    caller.replace(QuotaLimits())
    assert caller.tokens_left is None
    clock.now_s += 10
    assert not caller.is_untouched
    caller.replace(QuotaLimits(tokens_per_minute=120))
    assert caller.tokens_left == 20


@pytest.mark.parametrize("before", [None, 600])
def test_only_what_came_out_of_a_bucket_goes_back_there(clock: Clock, before: int | None) -> None:
    caller = allowance(clock, tokens_per_minute=before)
    early = held(caller, 600)
    caller.replace(QuotaLimits(tokens_per_minute=60))
    late = held(caller, 0 if before else 50)
    left = caller.tokens_left
    caller.release(early, 0)
    assert caller.tokens_left == left
    caller.release(late, 0)
    assert caller.tokens_left == (0 if before else 60)


def test_a_hold_that_grows_after_other_limits_takes_and_gives_back_its_growth(clock: Clock) -> None:
    caller = allowance(clock, tokens_per_minute=600)
    hold = held(caller, 20)
    caller.replace(QuotaLimits(tokens_per_minute=60))
    assert caller.tokens_left == 58
    caller.hold([(hold, Need(1, 50, 50))], POOL)
    assert caller.tokens_left == 28
    caller.release(hold, 0)
    assert caller.tokens_left == 58


def test_nobody_asks_for_a_higher_priority_than_its_own(clock: Clock) -> None:
    modest = allowance(clock, max_priority=5)
    modest.check_priority(5)
    assert refusal(lambda: modest.check_priority(6)).message == "priority = 6, its caller may have 5; lower it"


def test_an_allowance_is_forgotten_only_when_nothing_is_held_or_owed(clock: Clock) -> None:
    sixty = allowance(clock, tokens_per_minute=60)
    hold = held(sixty, 60)
    assert not sixty.is_untouched
    sixty.release(hold, 60)
    assert not sixty.is_untouched
    clock.now_s += 60
    assert sixty.is_untouched
