"""Which request is not tried again after engines died."""

from dataclasses import replace

import pytest

from pagedd.client.errors import PageddError
from pagedd.daemon import poison
from pagedd.daemon.poison import FORGET_AFTER_S, Suspect, Suspects
from pagedd.engine.request import Request
from pagedd.engine.sampling_params import SamplingParams

A, B, C = ("uid:1", b"a" * 16), ("uid:1", b"b" * 16), ("uid:1", b"c" * 16)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def suspects(clock: Clock) -> Suspects:
    return Suspects(clock)


def is_refused(suspects: Suspects, suspect: Suspect) -> bool:
    try:
        suspects.check(suspect)
    except PageddError as error:
        return error.code == "poison_request"
    return False


def test_the_second_death_is_one_too_many(suspects: Suspects) -> None:
    suspects.engine_died([A, B])
    assert not is_refused(suspects, A)
    suspects.engine_died([A, C])
    assert [is_refused(suspects, suspect) for suspect in (A, B, C)] == [True, False, False]
    assert C in suspects


def test_a_death_with_two_suspects_proves_nothing(suspects: Suspects) -> None:
    suspects.engine_died([A, B])
    suspects.engine_died([A, B])
    assert not is_refused(suspects, A)
    assert not is_refused(suspects, B)
    suspects.engine_died([A])
    assert is_refused(suspects, A)


def test_what_one_caller_sends_is_not_held_against_another(suspects: Suspects) -> None:
    suspects.engine_died([A])
    suspects.engine_died([A])
    assert not is_refused(suspects, ("uid:2", A[1]))


def test_the_same_request_twice_at_one_death_is_one_death(suspects: Suspects) -> None:
    suspects.engine_died([A, A])
    assert not is_refused(suspects, A)


def test_whoever_ran_to_its_end_meanwhile_is_innocent(suspects: Suspects) -> None:
    suspects.engine_died([A])
    suspects.clear(A)
    suspects.engine_died([A])
    assert not is_refused(suspects, A)


@pytest.mark.parametrize("num_deaths", [1, 2])
def test_an_old_suspicion_is_forgotten(suspects: Suspects, clock: Clock, num_deaths: int) -> None:
    for _ in range(num_deaths):
        suspects.engine_died([A])
    clock.now_s += FORGET_AFTER_S + 1
    assert not is_refused(suspects, A)
    suspects.engine_died([A])
    assert not is_refused(suspects, A)


def test_the_table_is_bounded(suspects: Suspects) -> None:
    suspects.engine_died([A])
    suspects.engine_died([A])
    for number in range(5000):
        suspects.engine_died([("uid:1", number.to_bytes(16, "big"))])
    assert not is_refused(suspects, A)


def test_a_digest_is_the_requests_own_however_often_and_by_whomever_it_is_sent() -> None:
    first = Request(request_id="a", prompt_token_ids=[1, 2, 3], params=SamplingParams(max_tokens=3, seed=1))
    again = replace(
        first, request_id="b", priority=9, cache_extras=(("caller", "uid:1"),), params=replace(first.params, seed=2)
    )
    assert poison.digest(first) == poison.digest(again)
    assert poison.digest(first) != poison.digest(replace(first, prompt_token_ids=[1, 2, 4]))
    assert poison.digest(first) != poison.digest(replace(first, params=SamplingParams(max_tokens=4, seed=1)))
