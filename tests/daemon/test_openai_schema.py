"""OpenAI's bodies as pagedd's messages."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedd.client.errors import ERROR_KINDS, PageddError
from pagedd.client.protocol import Chat, ChatMessage, Generate, Sampling, decode_client
from pagedd.daemon.admission import check_message, to_engine_request
from pagedd.daemon.openai_schema import (
    UNSUPPORTED_FIELDS,
    ChatBody,
    CompletionBody,
    chat_request,
    completion_request,
    decoding_error,
)

from .scripted_host import engine_info

MAX_PROMPTS = 128
USER = {"role": "user", "content": "hi"}


def completion(**fields: Any) -> Any:
    return completion_request(msgspec.json.encode({"prompt": "a", **fields}), MAX_PROMPTS)


def chat(**fields: Any) -> Any:
    return chat_request(msgspec.json.encode({"messages": [USER], **fields}))


def refusal(make: Any, **fields: Any) -> tuple[str, str | None]:
    with pytest.raises(PageddError) as refused:
        make(**fields)
    return refused.value.code, refused.value.field


def test_a_body_with_nothing_but_a_prompt_has_the_protocols_defaults() -> None:
    assert completion().messages == [Generate(id="0", prompt="a", stream=False)]
    assert chat().messages == [Chat(id="0", messages=[ChatMessage(role="user", content="hi")], stream=False)]


def test_null_is_not_given() -> None:
    names = [name for name in Sampling.__struct_fields__ if name != "logprobs"]
    nothing = dict.fromkeys([*names, "logprobs", "stream", "stream_options", "model", "priority", "cache_salt"])
    assert completion(**nothing).messages == completion().messages
    assert chat(**nothing).messages == chat().messages


@pytest.mark.parametrize(
    ("prompt", "messages"),
    [
        ("a", [Generate(id="0", prompt="a", stream=False)]),
        (["a", "b"], [Generate(id="0", prompt="a", stream=False), Generate(id="1", prompt="b", stream=False)]),
        ([1, 2], [Generate(id="0", prompt_token_ids=[1, 2], stream=False)]),
        (
            [[1], [2, 3]],
            [
                Generate(id="0", prompt_token_ids=[1], stream=False),
                Generate(id="1", prompt_token_ids=[2, 3], stream=False),
            ],
        ),
    ],
)
def test_a_prompt_has_four_forms(prompt: Any, messages: list[Generate]) -> None:
    assert completion(prompt=prompt).messages == messages


def test_stop_may_be_a_text_or_a_list() -> None:
    assert completion(stop="x").messages[0].sampling.stop == ["x"]
    assert completion(stop=["x", "y"]).messages[0].sampling.stop == ["x", "y"]


def test_a_completions_logprobs_is_a_number_and_a_chats_is_a_switch() -> None:
    assert completion(logprobs=3).messages[0].sampling.logprobs == 3
    assert chat(logprobs=True).messages[0].sampling.logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).messages[0].sampling.logprobs == 3
    assert chat(logprobs=False).messages[0].sampling.logprobs is None
    assert refusal(chat, top_logprobs=3) == ("invalid_value", "top_logprobs")
    assert refusal(completion, logprobs=True) == ("invalid_type", "logprobs")
    assert refusal(chat, logprobs=3) == ("invalid_type", "logprobs")


def test_max_completion_tokens_is_the_newer_name_and_wins() -> None:
    assert chat(max_completion_tokens=5, max_tokens=7).messages[0].sampling.max_tokens == 5
    assert chat(max_tokens=7).messages[0].sampling.max_tokens == 7
    assert chat(max_completion_tokens=5).renamed["max_tokens"] == "max_completion_tokens"


def test_text_parts_are_lines_of_one_message() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages[0].messages[0].content == "a\nb"


@pytest.mark.parametrize(
    ("content", "refused"),
    [
        ([{"type": "image_url", "image_url": {"url": "x"}}], ("unsupported_field", "messages.content")),
        ([{"type": "text"}], ("missing_field", "messages.content.text")),
        ([{"text": "a"}], ("missing_field", "messages.content.type")),
        ([5], ("invalid_type", "messages.content")),
        (5, ("invalid_type", "messages.content")),
        (None, ("invalid_type", "messages.content")),
    ],
)
def test_content_that_is_no_text_is_refused(content: Any, refused: tuple[str, str]) -> None:
    assert refusal(chat, messages=[{"role": "user", "content": content}]) == refused


UNSUPPORTED: list[tuple[Any, dict[str, Any]]] = [
    (completion, {"best_of": 2}),
    (completion, {"echo": True}),
    (completion, {"suffix": "x"}),
    (completion, {"prompt_embeds": "x"}),
    (completion, {"use_beam_search": True}),
    (completion, {"prompt_logprobs": 1}),
    (completion, {"use_beam_search": 0}),  # to Python, it is False
    (completion, {"logits_processors": ["x"]}),
    (completion, {"guided_json": {}}),
    (completion, {"guided_regex": "x"}),
    (completion, {"guided_choice": ["x"]}),
    (completion, {"guided_grammar": "x"}),
    (completion, {"structured_outputs": {"json": {}}}),
    (completion, {"response_format": {"type": "json_object"}}),
    (chat, {"response_format": {"type": "json_schema", "json_schema": {}}}),
    (chat, {"tools": [{"type": "function"}]}),
    (chat, {"tool_choice": "required"}),
    (chat, {"functions": [{}]}),
    (chat, {"function_call": {"name": "f"}}),
    (chat, {"modalities": ["text", "audio"]}),
    (chat, {"audio": {"voice": "x"}}),
    (chat, {"prediction": {}}),
    (chat, {"web_search_options": {}}),
]


@pytest.mark.parametrize(("make", "fields"), UNSUPPORTED, ids=lambda shown: getattr(shown, "__name__", repr(shown)))
def test_what_is_known_but_not_done_is_refused_by_name(make: Any, fields: dict[str, Any]) -> None:
    assert refusal(make, **fields) == ("unsupported_field", next(iter(fields)))


def test_a_message_that_answers_a_tool_is_refused() -> None:
    turn = {"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}
    assert refusal(chat, messages=[turn]) == ("unsupported_field", "tool_calls")


def test_every_field_that_is_not_done_is_in_these_tests() -> None:
    met = {next(iter(fields)) for _, fields in UNSUPPORTED} | {"tool_calls"}
    assert met - {"best_of"} == set(UNSUPPORTED_FIELDS)


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (completion, {"best_of": 3, "n": 3}),
        (completion, {"best_of": 1}),
        (completion, {"echo": False, "suffix": ""}),
        (completion, {"response_format": {"type": "text"}}),
        (chat, {"tools": [], "tool_choice": "none", "functions": []}),
        (chat, {"modalities": ["text"]}),
        (chat, {"a_field_of_2031": {"x": [1]}}),
    ],
)
def test_what_asks_for_nothing_is_taken(make: Any, fields: dict[str, Any]) -> None:
    assert make(**fields).messages


def test_usage_is_included_only_when_asked_for() -> None:
    assert completion(stream=True, stream_options={"include_usage": True}).include_usage
    assert not completion(stream=True, stream_options={}).include_usage
    assert not completion(stream=True).include_usage
    assert refusal(completion, stream_options={"include_usage": "yes"}) == (
        "invalid_type",
        "stream_options.include_usage",
    )


JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.sampled_from([0, 1, -1, 2**31, 2**63, 2**64, 10**30]),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=8),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=6,
)


def bodies(names: tuple[str, ...]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(names), JSON, max_size=6)


@settings(max_examples=1500, deadline=None)
@given(
    asked=st.one_of(
        st.tuples(st.just(completion), bodies(CompletionBody.__struct_fields__)),
        st.tuples(st.just(chat), bodies(ChatBody.__struct_fields__)),
    )
)
def test_whatever_a_body_holds_it_is_taken_or_refused_with_a_code(asked: tuple[Any, dict[str, Any]]) -> None:
    make, fields = asked
    assert outcome(make, fields) in (None, *ERROR_KINDS)


def outcome(make: Any, fields: dict[str, Any]) -> str | None:
    """The code of the refusal, None when it is taken."""
    try:
        for message in make(**fields).messages:
            check_message(message, "bytes")
            to_engine_request(message, "r", [1], engine_info(), eos_token_ids=[2], cache_extras=())
    except PageddError as error:
        return error.code
    return None


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"prompt": "a", "logit_bias": {"1": "x"}}', "logit_bias"),
        (b'{"prompt": "a", "stop": ["x", 1]}', "stop"),
    ],
)
def test_a_wrong_type_inside_a_field_names_the_field(body: bytes, field: str) -> None:
    with pytest.raises(PageddError) as refused:
        completion_request(body, MAX_PROMPTS)
    assert (refused.value.code, refused.value.field) == ("invalid_type", field)


def test_a_wrong_key_of_a_message_in_msgpack_names_the_field() -> None:
    wrong = msgspec.msgpack.encode({"type": "generate", "id": "a", "sampling": {"logit_bias": {1: 1.0}}})
    with pytest.raises(msgspec.ValidationError) as found:
        decode_client(wrong)
    refused = decoding_error(found.value)
    assert (refused.code, refused.field) == ("invalid_type", "logit_bias")


@pytest.mark.parametrize("prompt", [["", "a", "a"], [[], [1], [1]], ["a", 1, 2]])
def test_more_prompts_than_allowed_are_refused_before_any_is_looked_at(prompt: list[Any]) -> None:
    with pytest.raises(PageddError) as refused:
        completion_request(msgspec.json.encode({"prompt": prompt}), max_prompts=2)
    assert (refused.value.code, refused.value.field) == ("too_many_prompts", "prompt")
    # A list of ids is one prompt, however long.
    assert len(completion_request(b'{"prompt": [1, 2, 3]}', max_prompts=2).messages) == 1
