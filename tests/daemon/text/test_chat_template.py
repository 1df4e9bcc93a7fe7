"""Chats: exact to the template, one beginning of sequence, no control token from a message, refusals with a code."""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from pagedd.client.errors import PageddError
from pagedd.daemon.text.chat_template import ChatTemplate
from pagedd.daemon.text.tokenizer import TextTokenizer

many = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

Messages = list[dict[str, Any]]
MakeTemplate = Callable[..., ChatTemplate]

PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}"
    "{{ raise_exception('only user and assistant roles are supported!') }}{% endif %}{{ m.content }}{% endfor %}"
)
BOS, EOS = 1, 2  # <s> and </s> of the byte-fallback tokenizer


@pytest.fixture(scope="module")
def chat(tokenizer: TextTokenizer) -> ChatTemplate:
    return ChatTemplate(tokenizer.prepared, tokenizer)


@pytest.fixture
def with_template(byte_fallback_tokenizer: TextTokenizer) -> Iterator[MakeTemplate]:
    """Makes a `ChatTemplate` of any source over the byte-fallback tokenizer."""
    made = []

    def make(source: str | None, **changes: Any) -> ChatTemplate:
        prepared = msgspec.structs.replace(byte_fallback_tokenizer.prepared, chat_template=source, **changes)
        made.append(ChatTemplate(prepared, byte_fallback_tokenizer))
        return made[-1]

    yield make
    for template in made:
        template.close()


def user(content: Any) -> Messages:
    return [{"role": "user", "content": content}]


def smollm_text(messages: Messages) -> str:
    text = (
        ""
        if messages[0]["role"] == "system"
        else ("<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n")
    )
    for message in messages:
        text += f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
    return text + "<|im_start|>assistant\n"


# --- exactness -------------------------------------------------------------------------------------------------------

contents = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
conversations = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": contents}),
    min_size=1,
    max_size=4,
)


@many
@given(messages=conversations)
def test_an_ordinary_chat_has_the_ids_of_the_rendered_text(
    chat: ChatTemplate, reference: Tokenizer, messages: Messages
) -> None:
    assert chat.encode_chat(messages) == reference.encode(smollm_text(messages), add_special_tokens=False).ids


def test_the_generation_prompt_is_left_out_on_request(chat: ChatTemplate, tokenizer: TextTokenizer) -> None:
    ids = chat.encode_chat(user("hi"), add_generation_prompt=False)
    assert tokenizer.decode(ids, skip_special=False).endswith("<|im_start|>user\nhi<|im_end|>\n")


def test_a_template_in_a_process_of_its_own_gives_the_same_ids(chat: ChatTemplate, tokenizer: TextTokenizer) -> None:
    source = tokenizer.prepared.chat_template
    assert source is not None
    unknown = msgspec.structs.replace(tokenizer.prepared, chat_template=source + "{# not in the list #}")
    apart = ChatTemplate(unknown, tokenizer)
    messages = [{"role": "system", "content": "Be brief. 世"}, *user("1 < 2 <|im_end|>")]
    assert apart.encode_chat(messages) == chat.encode_chat(messages)
    apart.close()


# --- one beginning of sequence ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["{{ bos_token }}" + PLAIN, PLAIN])
def test_template_and_tokenizer_together_give_exactly_one_beginning_of_sequence(
    with_template: MakeTemplate, source: str
) -> None:
    ids = with_template(source).encode_chat(user("ab"))
    assert ids[0] == BOS
    assert ids.count(BOS) == 1
    assert with_template(source).encode_chat(user("<s>ab")).count(BOS) == 1


def test_a_model_that_wants_no_beginning_of_sequence_gets_only_the_templates(with_template: MakeTemplate) -> None:
    assert BOS not in with_template(PLAIN, adds_bos=False).encode_chat(user("ab"))
    assert with_template("{{ bos_token }}" + PLAIN, adds_bos=False).encode_chat(user("ab")).count(BOS) == 1


# --- messages do not become control tokens ---------------------------------------------------------------------------


@many
@given(data=st.data())
def test_a_chat_has_the_control_tokens_of_its_template_whatever_its_messages_spell(
    chat: ChatTemplate, tokenizer: TextTokenizer, data: st.DataObject
) -> None:
    special = sorted(tokenizer.prepared.special_tokens)
    parts = st.sampled_from([*special, "<", "<|", "<|im_", "start|>", "|>", " ", "\n", "a"])
    content = "".join(data.draw(st.lists(parts, max_size=8)))
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "ok"}]
    ids = chat.encode_chat(messages)
    assert [i for i in ids if i in tokenizer.special_ids] == [1, 2] * 3 + [1]
    assert tokenizer.decode(ids, skip_special=False) == smollm_text(messages)


def test_a_control_token_spelled_across_two_contents_or_in_another_case_stays_text(
    with_template: MakeTemplate, byte_fallback_tokenizer: TextTokenizer
) -> None:
    parts = [{"type": "text", "text": text} for text in ("a</", "s>b")]
    template = "{% for p in messages[0].content %}{{ p.text | trim }}{% endfor %}{{ eos_token }}"
    for content in (parts, [{"text": "a</ "}, {"text": "s>b"}], [{"text": "a<"}, {"text": "/s>b"}]):
        ids = with_template(template).encode_chat(user(content))
        assert (ids.count(EOS), ids[-1]) == (1, EOS)
        assert byte_fallback_tokenizer.decode(ids) == "a</s>b"
    lowered = with_template("{{ messages[0].content | lower }}").encode_chat(user("a</S>b"))
    assert EOS not in lowered
    assert byte_fallback_tokenizer.decode(lowered) == "a</s>b"


def test_control_tokens_in_nested_values_and_keys_stay_text(with_template: MakeTemplate) -> None:
    calls = [{"arguments": {"</s>": ["</s>"]}}]
    template = "{{ messages[0].tool_calls | tojson }}{{ messages[0].name }}"
    ids = with_template(template).encode_chat([{"role": "assistant", "tool_calls": calls, "name": "</s>"}])
    assert EOS not in ids


def test_a_template_may_build_its_control_tokens_from_the_role(with_template: MakeTemplate) -> None:
    ids = with_template("{{ '<' + messages[0].role + '>' }}", adds_bos=False).encode_chat([{"role": "s"}])
    assert ids == [BOS]


# --- refusals --------------------------------------------------------------------------------------------------------


def refusal(chat: ChatTemplate, messages: Messages) -> PageddError:
    with pytest.raises(PageddError) as refused:
        chat.encode_chat(messages)
    assert refused.value.field == "messages"
    return refused.value


def test_no_messages_are_refused(chat: ChatTemplate) -> None:
    assert refusal(chat, []).code == "empty_messages"


def test_a_model_without_a_template_says_so(with_template: MakeTemplate) -> None:
    assert refusal(with_template(None), user("a")).code == "no_chat_template"


def test_a_refused_role_gets_the_templates_own_words(with_template: MakeTemplate) -> None:
    template = with_template(NO_SYSTEM)
    for role in ("system", "wizard"):
        error = refusal(template, [{"role": role, "content": "a"}])
        assert error.code == "template_error"
        assert error.message == "only user and assistant roles are supported!"
    assert template.encode_chat(user("a"))


@pytest.mark.parametrize("content", [None, 3, ["a"], {"a": 1}])
def test_a_content_that_the_template_cannot_use_is_refused_and_is_no_fault(chat: ChatTemplate, content: object) -> None:
    assert refusal(chat, user(content)).code == "template_error"
    assert refusal(chat, [{"role": "user"}]).code == "template_error"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ messages[0].missing.field }}", "UndefinedError"),
        ("{{ messages[0].content.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
    ],
)
def test_a_broken_template_is_refused_each_time_with_what_went_wrong(
    with_template: MakeTemplate, source: str, reason: str
) -> None:
    template = with_template(source)
    for _ in range(2):
        error = refusal(template, user("a"))
        assert error.code == "template_error"
        assert reason in error.message
