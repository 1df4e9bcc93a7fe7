"""Which decoders are understood, and that each gives the library's text."""

import pytest

from pagedd.client.errors import PageddError
from pagedd.daemon.text.token_bytes import token_bytes_rule

REPLACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def test_byte_level_tokens_map_each_character_to_a_byte() -> None:
    rule = token_bytes_rule({"type": "ByteLevel"})
    assert rule("Ġhi") == b" hi"
    assert rule("ä\u00b8") == b"\xe4\xb8"
    assert rule("Ċ") == b"\n"


def test_a_byte_level_token_that_was_added_as_text_keeps_its_text() -> None:
    assert token_bytes_rule({"type": "ByteLevel"})("two words 世") == "two words 世".encode()


def test_the_llama_decoder_is_spaces_bytes_and_a_stripped_first_space() -> None:
    steps = [REPLACE, {"type": "ByteFallback"}, {"type": "Fuse"}, STRIP]
    rule = token_bytes_rule({"type": "Sequence", "decoders": steps})
    assert rule("▁a▁b") == b" a b"
    assert rule("<0xE4>") == b"\xe4"
    assert rule("<0xE4>!") == b"<0xE4>!"
    assert rule.strips_first_space


def test_a_decoder_without_byte_fallback_leaves_the_spelling_of_a_byte_alone() -> None:
    rule = token_bytes_rule({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never"})
    assert rule("<0xE4>") == b"<0xE4>"
    assert not rule.strips_first_space


@pytest.mark.parametrize(
    "decoder",
    [None, {"type": "WordPiece"}, {"type": "Strip", "content": " ", "start": 0, "stop": 1}, {"type": "CTC"}],
)
def test_other_decoders_are_refused_by_name(decoder: dict[str, object] | None) -> None:
    with pytest.raises(PageddError, match="unsupported_model") as refusal:
        token_bytes_rule(decoder)
    assert str(decoder["type"] if decoder else None) in refusal.value.message
