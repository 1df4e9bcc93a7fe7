"""Incremental text: nothing is lost, nothing is half a character, whatever the ids."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from pagedd.daemon.text.detokenizer import Detokenizer
from pagedd.daemon.text.tokenizer import TextTokenizer

MIXED_TEXT = "A 世ab 👨‍👩‍👧‍👦 삼겹살 ďáb"

many = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def byte_ids(tokenizer: TextTokenizer) -> dict[int, int]:
    """byte -> an id whose whole text is that byte; some vocabularies lack a few."""
    found: dict[int, int] = {}
    for token_id in range(tokenizer.vocab_size):
        raw = tokenizer.token_bytes(token_id)
        if len(raw) == 1 and token_id not in tokenizer.special_ids:
            found.setdefault(raw[0], token_id)
    return found


def pushed_one_by_one(tokenizer: TextTokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push([token_id]) for token_id in ids), detokenizer.finish()]


def test_a_text_that_comes_one_byte_token_at_a_time_comes_out_whole(
    tokenizer: TextTokenizer, byte_fallback_tokenizer: TextTokenizer
) -> None:
    for each in (tokenizer, byte_fallback_tokenizer):
        of_byte = byte_ids(each)
        ids = [of_byte[byte] for byte in MIXED_TEXT.encode()]
        pieces = pushed_one_by_one(each, ids)
        assert "".join(pieces) == MIXED_TEXT == each.decode(ids)
        assert not any("\ufffd" in piece for piece in pieces)
        assert pieces[-1] == ""


def test_four_interleaved_streams_do_not_mix_and_only_the_cut_one_ends_in_a_replacement_character(
    tokenizer: TextTokenizer,
) -> None:
    of_byte = byte_ids(tokenizer)
    texts = [MIXED_TEXT, MIXED_TEXT[::-1], "삼겹살" * 4, "👨‍👩‍👧‍👦"]
    streams = [[of_byte[byte] for byte in text.encode()] for text in texts]
    streams[3] = streams[3][:-2]  # inside the last emoji
    detokenizers = [Detokenizer(tokenizer) for _ in streams]
    sent = ["", "", "", ""]
    for position in range(max(map(len, streams))):
        for k, stream in enumerate(streams):
            if position < len(stream):
                sent[k] += detokenizers[k].push([stream[position]])
    assert not any("\ufffd" in text for text in sent)
    sent = [text + detokenizer.finish() for text, detokenizer in zip(sent, detokenizers, strict=True)]
    assert sent == [*texts[:3], "👨‍👩‍👧‍\ufffd"]
    assert sent == [tokenizer.decode(stream) for stream in streams]


def test_a_byte_that_belongs_to_no_character_comes_out_at_once_and_is_not_waited_for(
    byte_fallback_tokenizer: TextTokenizer,
) -> None:
    first = 3
    ids = [first + 0xFF, first + 0xE4, first + 0xFF, first + ord("x")]
    assert pushed_one_by_one(byte_fallback_tokenizer, ids) == ["\ufffd", "", "\ufffd\ufffd", "x", ""]


def test_at_most_three_bytes_are_held_back_however_long_a_run_of_them_is(
    byte_fallback_tokenizer: TextTokenizer,
) -> None:
    first = 3
    pieces = pushed_one_by_one(byte_fallback_tokenizer, [first + 0xE4] * 100)
    assert pieces == ["", *["\ufffd"] * 99, "\ufffd"]


def test_control_tokens_have_no_text_and_do_not_break_a_character(byte_fallback_tokenizer: TextTokenizer) -> None:
    first, end = 3, 2
    split_by_control = [first + 0xE4, end, first + 0xB8, first + 0x96]
    assert pushed_one_by_one(byte_fallback_tokenizer, split_by_control) == ["", "", "", "世", ""]
    shown = Detokenizer(byte_fallback_tokenizer, skip_special=False)
    assert shown.push([end]) == "</s>"


def test_the_space_that_the_tokenizer_put_before_a_text_is_dropped_once_and_kept_when_a_text_goes_on(
    byte_fallback_tokenizer: TextTokenizer,
) -> None:
    ids = byte_fallback_tokenizer.encode(" ab a", add_bos=False)
    assert byte_fallback_tokenizer.decode(ids) == " ab a"
    assert "".join(pushed_one_by_one(byte_fallback_tokenizer, ids)) == " ab a"
    goes_on = Detokenizer(byte_fallback_tokenizer, continues_text=True)
    assert goes_on.push(byte_fallback_tokenizer.encode("ab", add_bos=False)) == " ab"


@many
@given(data=st.data())
def test_pieces_joined_equal_the_decoded_whole_for_any_ids(
    tokenizer: TextTokenizer, reference: Tokenizer, data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1) | st.integers(0, 300), max_size=40))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(ids[a:b]) for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    text = "".join(pieces) + detokenizer.finish()
    assert text == tokenizer.decode(ids) == reference.decode(ids)


@many
@given(data=st.data())
def test_byte_fallback_pieces_joined_equal_the_decoded_whole_for_any_ids(
    byte_fallback_tokenizer: TextTokenizer, byte_fallback_reference: Tokenizer, data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(0, byte_fallback_tokenizer.vocab_size - 1), max_size=40))
    text = "".join(pushed_one_by_one(byte_fallback_tokenizer, ids))
    assert text == byte_fallback_tokenizer.decode(ids)
    expected = byte_fallback_reference.decode(ids)
    # `tokenizers` gives up a whole run of bytes for one bad byte in it; here only the bad byte is lost.
    assert text == expected or ("\ufffd" in text and "\ufffd" in expected)
