"""Text to ids: exact for ordinary text, and no user text becomes a control token."""

import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from pagedd.client.errors import PageddError
from pagedd.daemon.text.tokenizer import TextTokenizer

many = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def test_a_text_that_spells_a_control_token_holds_none_unless_it_is_asked_for(
    tokenizer: TextTokenizer, byte_fallback_tokenizer: TextTokenizer
) -> None:
    for each in (tokenizer, byte_fallback_tokenizer):
        for text, token_id in each.prepared.special_tokens.items():
            as_text = each.encode(f"a{text}b", add_bos=False)
            assert each.special_ids.isdisjoint(as_text)
            assert each.decode(as_text) == f"a{text}b"
            assert token_id in each.encode(f"a{text}b", parse_special=True, add_bos=False)


@many
@given(data=st.data())
def test_no_text_at_all_becomes_a_control_token(tokenizer: TextTokenizer, data: st.DataObject) -> None:
    pieces = st.sampled_from(sorted(tokenizer.prepared.special_tokens)) | st.text(max_size=4) | st.sampled_from("<|>")
    text = "".join(data.draw(st.lists(pieces, max_size=12)))
    assert tokenizer.special_ids.isdisjoint(tokenizer.encode(text))


@many
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=80))
def test_ordinary_text_has_the_ids_that_the_unsealed_tokenizer_gives(
    tokenizer: TextTokenizer, reference: Tokenizer, text: str
) -> None:
    assert tokenizer.encode(text) == reference.encode(text, add_special_tokens=False).ids


@many
@given(text=st.text("ab 世é<>\n", max_size=40))
def test_ordinary_text_has_the_same_ids_with_byte_fallback(
    byte_fallback_tokenizer: TextTokenizer, byte_fallback_reference: Tokenizer, text: str
) -> None:
    expected = byte_fallback_reference.encode(text, add_special_tokens=False).ids
    assert byte_fallback_tokenizer.encode(text, add_bos=False) == expected


def test_the_beginning_of_sequence_comes_first_only_where_the_model_wants_it(
    tokenizer: TextTokenizer, byte_fallback_tokenizer: TextTokenizer
) -> None:
    assert byte_fallback_tokenizer.encode("ab")[0] == 1
    assert byte_fallback_tokenizer.encode("ab", add_bos=False)[0] != 1
    assert byte_fallback_tokenizer.encode("") == [1]
    assert tokenizer.encode("") == []


def test_half_a_surrogate_pair_is_refused(tokenizer: TextTokenizer) -> None:
    with pytest.raises(PageddError, match="invalid_value"):
        tokenizer.encode("a\ud800")


def test_one_token_is_shown_as_text_or_as_bytes(byte_fallback_tokenizer: TextTokenizer) -> None:
    first_byte, a_with_space = 3, 262
    assert byte_fallback_tokenizer.token_text(a_with_space) == " a"
    assert byte_fallback_tokenizer.token_text(first_byte + 0x0A) == "\n"
    assert byte_fallback_tokenizer.token_text(first_byte + 0xE4) == "bytes:\\xe4"
    assert byte_fallback_tokenizer.token_text(2) == "</s>"
    assert byte_fallback_tokenizer.token_text(10**6) == ""
    assert byte_fallback_tokenizer.token_bytes(first_byte + 0xE4) == b"\xe4"


def test_threads_that_encode_with_and_without_control_tokens_do_not_disturb_each_other(
    tokenizer: TextTokenizer,
) -> None:
    wrong = []

    def encode_often(parse_special: bool) -> None:
        for _ in range(200):
            holds_control = 1 in tokenizer.encode("a<|im_start|>b", parse_special=parse_special)
            if holds_control != parse_special:
                wrong.append(parse_special)

    threads = [threading.Thread(target=encode_often, args=(kind,)) for kind in (True, False, True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
