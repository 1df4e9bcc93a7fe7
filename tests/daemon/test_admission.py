"""The table of limits, and messages as engine requests."""

import math
from typing import Any

import pytest

from pagedd.client.errors import PageddError
from pagedd.client.protocol import Chat, ChatMessage, Generate, Sampling
from pagedd.daemon.admission import cache_extras, check_message, to_engine_request, token_bounds
from pagedd.daemon.caller import Caller
from pagedd.daemon.limits import LIMITS, MAX_LOGPROBS, Limit
from pagedd.engine.request import Request

from .byte_model import EOS, VOCAB_SIZE
from .scripted_host import engine_info


def admit(message: Generate | Chat, ids: list[int] | None = None, **info: int) -> Request:
    check_message(message, "bytes")
    return to_engine_request(
        message, "r1", ids or [1, 2, 3], engine_info(**info), eos_token_ids=[EOS], cache_extras=(("caller", "uid:5"),)
    )


def generate(**sampling: object) -> Generate:
    return Generate(id="a", prompt="abc", sampling=Sampling(**sampling))  # type: ignore[arg-type]


CHAT = Chat(id="a", messages=[ChatMessage(role="user", content="hi")])


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        (Limit("f", "", low=0, high=1, low_is_open=True), "(0, 1]"),
        (Limit("f", "", low=1), ">= 1"),
        (Limit("f", "", max_items=16, max_chars=256), "at most 16 items, each of 1 to 256 characters"),
        (Limit("f", "", high=1, low=-1, max_items=2), "at most 2 items, values in [-1, 1]"),
        (Limit("f", "", max_items=2, in_vocabulary=True), "at most 2 items, token ids of the model"),
    ],
)  # fmt: skip
def test_a_limit_says_its_range_in_words(limit: Limit, text: str) -> None:
    assert limit.range == text


@pytest.mark.parametrize("value", [0, 1.5, math.nan, math.inf, [0.5, 2], {"a": -1}])
def test_a_limit_on_numbers_holds_for_each_of_a_list_or_mapping(value: object) -> None:
    with pytest.raises(PageddError) as refused:
        Limit("f", "", low=0, high=1, low_is_open=True, max_items=9).check(value)
    assert (refused.value.code, refused.value.field) == ("invalid_value", "f")


def test_what_is_not_given_is_within_every_limit() -> None:
    for limit in LIMITS.values():
        limit.check(None)


def test_every_field_of_sampling_is_in_the_table() -> None:
    assert set(Sampling.__struct_fields__) - {"ignore_eos"} <= set(LIMITS)


def test_absent_max_tokens_is_16_for_a_completion_and_the_rest_of_the_context_for_a_chat() -> None:
    assert admit(generate()).params.max_tokens == 16
    assert admit(CHAT).params.max_tokens == 2048 - 3
    assert admit(CHAT, max_request_tokens=100).params.max_tokens == 97


def test_absent_max_tokens_is_less_where_less_fits_and_more_where_more_was_demanded() -> None:
    assert admit(generate(), ids=[1] * 2040).params.max_tokens == 8
    assert admit(generate(min_tokens=30)).params.max_tokens == 30


def test_a_minimum_that_does_not_fit_is_refused() -> None:
    with pytest.raises(PageddError, match="prompt 2040 \\+ output 30 = 2070 tokens, context 2048"):
        admit(generate(min_tokens=30), ids=[1] * 2040)


@pytest.mark.parametrize(("given", "used"), [(-1, 0), (0, 0), (1, 1), (VOCAB_SIZE, 0), (10**9, 0)])
def test_top_k_that_keeps_all_is_off(given: int, used: int) -> None:
    assert admit(generate(top_k=given)).params.top_k == used


@pytest.mark.parametrize(("given", "used"), [(0.0, 0.0), (1e-300, 0.0), (1e-5, 0.0), (1e-4, 1e-4), (2.5, 2.5)])
def test_a_temperature_too_small_to_divide_by_is_greedy(given: float, used: float) -> None:
    assert admit(generate(temperature=given)).params.temperature == used


def test_the_models_ends_and_the_callers_own_stop_a_text() -> None:
    assert admit(generate(stop_token_ids=[7, EOS])).params.stop_token_ids == (EOS, 7)
    assert admit(generate(stop_token_ids=[7], ignore_eos=True)).params.stop_token_ids == (7,)


def test_a_seed_is_kept_or_drawn() -> None:
    assert admit(generate(seed=-5)).params.seed == -5
    drawn = {admit(generate()).params.seed for _ in range(5)}
    assert len(drawn) == 5
    assert all(0 <= seed < 2**63 for seed in drawn)


def test_biases_are_numbers_by_token_id() -> None:
    assert admit(generate(logit_bias={"7": 1, "0": -100.0})).params.logit_bias == {7: 1.0, 0: -100.0}


def test_a_prompt_is_text_or_ids_and_not_both() -> None:
    with pytest.raises(PageddError, match="both") as both:
        check_message(Generate(id="a", prompt="a", prompt_token_ids=[1]), "bytes")
    with pytest.raises(PageddError, match="neither") as neither:
        check_message(Generate(id="a"), "bytes")
    assert (both.value.code, neither.value.code) == ("invalid_value", "missing_field")


def test_a_text_without_tokens_is_an_empty_prompt() -> None:
    with pytest.raises(PageddError) as refused:
        to_engine_request(generate(), "r1", [], engine_info(), eos_token_ids=[], cache_extras=())
    assert refused.value.code == "empty_prompt"


def test_a_salt_and_a_caller_of_the_same_name_are_different_things() -> None:
    user = Caller(uid=5)
    salted = Generate(id="a", prompt="a", cache_salt="uid:5")
    assert cache_extras(generate(), user, "caller") == (("caller", "uid:5"),)
    assert cache_extras(salted, user, "caller") == (("caller", "uid:5"), ("salt", "uid:5"))
    assert cache_extras(salted, user, "all") == (("salt", "uid:5"),)
    assert cache_extras(generate(), user, "all") == ()


def test_a_user_and_a_key_never_share_a_tag() -> None:
    assert Caller(uid=5).tag != Caller(key_id="5").tag != Caller(key_id="6").tag


@pytest.mark.parametrize(
    ("message", "bounds"),
    [
        (Generate(id="a", prompt="abcdefgh", sampling=Sampling(max_tokens=5)), (2, 5, 8 + 5)),
        (Generate(id="a", prompt="éé", sampling=Sampling(max_tokens=5, n=3)), (1, 5, 4 + 15)),
        (Generate(id="a", prompt_token_ids=[1, 2, 3], sampling=Sampling(max_tokens=5)), (3, 5, 3 + 5)),
        (Generate(id="a", prompt="abcd", sampling=Sampling(min_tokens=3, n=2)), (1, 3, 4 + 2 * 16)),
        (Generate(id="a", prompt="abcd", sampling=Sampling(min_tokens=30)), (1, 30, 4 + 30)),
        (Chat(id="a", messages=[ChatMessage(role="user", content="abcd")]), (1, 1, 99)),
        (
            Chat(id="a", messages=[ChatMessage(role="user", content="abcd")] * 2, sampling=Sampling(max_tokens=1)),
            (2, 1, 8 + 1),
        ),
    ],
)
def test_before_it_is_tokenized_a_message_has_a_fewest_and_a_most(
    message: Generate | Chat, bounds: tuple[int, int, int]
) -> None:
    assert token_bounds(message, max_token_bytes=4, most=99) == bounds


def test_a_quota_bounds_the_output_that_was_not_asked_for_and_no_other() -> None:
    def most_output(quota: int, **sampling: Any) -> int:
        message = Chat(id="a", messages=[ChatMessage(role="user", content="x")], sampling=Sampling(**sampling))
        request = to_engine_request(
            message, "r", [1] * 10, engine_info(), eos_token_ids=[], cache_extras=(), most_output_tokens=quota
        )
        return request.params.max_tokens

    assert most_output(40) == 40
    assert most_output(40, max_tokens=100) == 100
    assert most_output(-5) == 1
    assert most_output(-5, min_tokens=7) == 7


def test_log_probabilities_bound_the_output_that_was_not_asked_for() -> None:
    def most_output(**sampling: Any) -> int:
        message = Chat(id="a", messages=[ChatMessage(role="user", content="x")], sampling=Sampling(**sampling))
        return admit(message, max_model_len=1 << 20, max_request_tokens=1 << 20).params.max_tokens

    assert most_output(n=8) == (1 << 20) - 3
    assert most_output(n=8, logprobs=0) == MAX_LOGPROBS // 8
    assert most_output(n=8, logprobs=20) == MAX_LOGPROBS // (8 * 21)
