"""GGUF tokenizers: exact for what is known, refused by name for what is not."""

from pathlib import Path
from typing import Any

import pytest

from pagedd.client.errors import PageddError
from pagedd.daemon.gguf_metadata import read_metadata
from pagedd.daemon.gguf_tokenizer import BYTE_PAIR_RULES, GgufTokenizer, build_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def byte_pair(pre: str = "gpt-2", **changes: Any) -> dict[str, Any]:
    tokens = ["<|end|>", "a", "b", "c", "1", "2", "Ġ", "ab", "12", "abc", "<tool>", "[PAD]"]
    types = [CONTROL, *[NORMAL] * 9, USER_DEFINED, UNUSED]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.token_type": list(types),
        "tokenizer.ggml.merges": ["a b", "1 2"],
        "tokenizer.ggml.eos_token_id": 0,
    }
    return metadata | {f"tokenizer.{key}": value for key, value in changes.items()}


def sentence_piece(pieces: list[tuple[str, float]], **changes: Any) -> dict[str, Any]:
    """<unk> 0, <s> 1, </s> 2, the bytes 3 to 258, then `pieces`."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *(text for text, _ in pieces)]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.scores": [0.0] * 259 + [score for _, score in pieces],
        "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return metadata | {f"tokenizer.{key}": value for key, value in changes.items()}


def tokens_of(built: GgufTokenizer, text: str) -> list[str]:
    tokens: list[str] = built.tokenizer.encode(text, add_special_tokens=False).tokens
    return tokens


def refusal(metadata: dict[str, Any]) -> str:
    with pytest.raises(PageddError) as refused:
        build_tokenizer(metadata)
    assert refused.value.code == "unsupported_model"
    return refused.value.message


# --- byte-level BPE --------------------------------------------------------------------------------------------------


def test_merges_run_within_words_and_digits_stay_apart_where_the_family_splits_them() -> None:
    assert tokens_of(build_tokenizer(byte_pair("gpt-2")), "ab 12") == ["ab", "Ġ", "12"]
    assert tokens_of(build_tokenizer(byte_pair("smollm")), "ab 12") == ["ab", "Ġ", "1", "2"]
    assert tokens_of(build_tokenizer(byte_pair("qwen2")), "12") == ["1", "2"]
    assert tokens_of(build_tokenizer(byte_pair("llama-bpe")), "12") == ["12"]


def test_only_the_llama_3_family_takes_a_whole_word_without_its_merges() -> None:
    assert tokens_of(build_tokenizer(byte_pair("llama-bpe")), "abc") == ["abc"]
    assert tokens_of(build_tokenizer(byte_pair("gpt-2")), "abc") == ["ab", "c"]


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["I", "'ll", " pay", " 1234", "€!!", "\n\n ", " x", " DON", "'", "T"]),
        ("smollm", ["I", "'ll", " pay", " ", "1", "2", "3", "4", "€!!", "\n\n ", " x", " DON", "'", "T"]),
        ("llama-bpe", ["I", "'ll", " pay", " ", "123", "4", "€!!\n\n", " ", " x", " DON", "'T"]),
        ("qwen2", ["I", "'ll", " pay", " ", "1", "2", "3", "4", "€!!\n\n", " ", " x", " DON", "'T"]),
    ],
)
def test_each_family_cuts_words_its_own_way(pre: str, words: list[str]) -> None:
    text = "I'll pay 1234€!!\n\n  x DON'T"
    cut = [text[start:end] for _, (start, end) in BYTE_PAIR_RULES[pre].pre_tokenizer().pre_tokenize_str(text)]
    assert [word for word in cut if word] == words


def test_types_decide_what_is_control_what_is_matched_whole_and_what_has_no_text() -> None:
    built = build_tokenizer(byte_pair())
    assert built.special_tokens == {"<|end|>": 0}
    assert built.vocab_size == 12
    assert tokens_of(built, "a<tool>b<|end|>") == ["a", "<tool>", "b", "<|end|>"]
    assert built.tokenizer.decode([1, 0, 10, 11, 2]) == "a<tool>b"
    assert built.tokenizer.token_to_id("[PAD]") is None


def test_the_real_models_facts(model_gguf: Path) -> None:
    built = build_tokenizer(read_metadata(model_gguf))
    assert built.vocab_size == 49152
    assert (built.bos_token_id, built.adds_bos, built.eos_token_ids) == (1, False, [2])
    assert built.special_tokens["<|im_start|>"] == 1
    assert len(built.special_tokens) == 17
    assert built.template_variables["eos_token"] == "<|im_end|>"
    assert built.chat_template is not None
    assert tokens_of(built, "In 2024 we") == ["In", "Ġ", "2", "0", "2", "4", "Ġwe"]
    assert built.tokenizer.encode("The capital of France is").ids == [504, 3575, 282, 4649, 314]


# --- SentencePiece ---------------------------------------------------------------------------------------------------


def test_the_best_score_merges_first() -> None:
    pieces = [("▁", -9.0), ("a", -9.0), ("b", -9.0), ("c", -9.0), ("ab", -2.0), ("bc", -1.0), ("▁ab", -3.0)]
    built = build_tokenizer(sentence_piece(pieces))
    assert tokens_of(built, "abc") == ["▁", "a", "bc"]
    assert tokens_of(built, "ab") == ["▁ab"]


def test_what_has_no_piece_becomes_bytes_and_comes_back() -> None:
    built = build_tokenizer(sentence_piece([("▁", -1.0), ("a", -1.0)]))
    ids = built.tokenizer.encode("a世", add_special_tokens=False).ids
    assert ids == [259, 260, 3 + 0xE4, 3 + 0xB8, 3 + 0x96]
    assert built.tokenizer.decode(ids) == "a世"
    assert built.adds_bos


def test_the_space_before_a_text_is_left_out_where_the_file_says_so() -> None:
    built = build_tokenizer(sentence_piece([("▁", -1.0), ("a", -1.0)], **{"ggml.add_space_prefix": False}))
    assert tokens_of(built, "a a") == ["a", "▁", "a"]
    assert built.tokenizer.decode(built.tokenizer.encode(" a").ids) == " a"


def test_plain_text_never_merges_into_a_control_token_or_a_byte() -> None:
    metadata = sentence_piece([(text, -1.0) for text in ("▁", "<", "s", ">", "<s", "0x0A")])
    built = build_tokenizer(metadata)
    built.tokenizer.encode_special_tokens = True
    assert tokens_of(built, "<s>") == ["▁", "<s", ">"]
    assert 3 + 0x0A not in built.tokenizer.encode("<0x0A>").ids


# --- declared facts --------------------------------------------------------------------------------------------------


def test_every_declared_end_counts() -> None:
    ends: dict[str, Any] = {"ggml.eos_token_id": 0, "ggml.eot_token_id": 2, "ggml.eom_token_id": 1}
    assert build_tokenizer(byte_pair(**ends)).eos_token_ids == [0, 1, 2]


def test_a_beginning_of_sequence_is_added_if_the_file_says_so_else_by_family() -> None:
    assert not build_tokenizer(byte_pair("gpt-2", **{"ggml.bos_token_id": 0})).adds_bos
    assert build_tokenizer(byte_pair("gpt-2", **{"ggml.bos_token_id": 0, "ggml.add_bos_token": True})).adds_bos
    assert build_tokenizer(byte_pair("llama-bpe", **{"ggml.bos_token_id": 0})).adds_bos
    assert not build_tokenizer(byte_pair("llama-bpe", **{"ggml.add_bos_token": True})).adds_bos  # it has none


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ggml.model": "t5"}, "'t5'"),
        ({"ggml.pre": "default"}, "'default'"),
        ({"ggml.pre": "tekken"}, "'tekken'"),
        ({"ggml.pre": 3}, "is a int, not a str"),
        ({"ggml.tokens": []}, "is empty"),
        ({"ggml.tokens": "abc"}, "is a str, not a list"),
        ({"ggml.tokens": ["a", 1]}, "holds something else than str"),
        ({"ggml.token_type": [1]}, "12 tokens have 1 token types"),
        ({"ggml.merges": ["a b", "a z"]}, "the merge 'a z'"),
        ({"ggml.merges": ["ab"]}, "the merge 'ab'"),
        ({"ggml.eos_token_id": 12}, "12 is outside its vocabulary of 12"),
        ({"ggml.bos_token_id": -1}, "-1 is outside"),
        ({"ggml.add_bos_token": "yes"}, "is a str, not a bool"),
        ({"chat_template": 1}, "is a int, not a str"),
    ],
)
def test_what_is_not_known_exactly_is_refused_by_name(changes: dict[str, Any], reason: str) -> None:
    assert reason in refusal(byte_pair(**changes))


def test_missing_keys_and_doubled_tokens_are_refused_by_name() -> None:
    without_pre = byte_pair()
    del without_pre["tokenizer.ggml.pre"]
    assert "no tokenizer.ggml.pre" in refusal(without_pre)
    doubled: list[Any] = ["a"] * 12
    assert "'a' stands twice" in refusal(byte_pair(**{"ggml.tokens": doubled}))
    assert "no tokenizer.ggml.tokens" in refusal({})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ggml.remove_extra_whitespaces": True}, "removes extra whitespace"),
        ({"ggml.scores": [1.0]}, "259 tokens have 1 scores"),
        ({"ggml.token_type": [UNKNOWN, CONTROL, CONTROL, NORMAL, *[BYTE] * 255]}, "255 byte tokens"),
        ({"ggml.token_type": [CONTROL, CONTROL, CONTROL, *[BYTE] * 256]}, "0 unknown tokens"),
    ],
)
def test_a_sentence_piece_vocabulary_that_is_not_whole_is_refused(changes: dict[str, Any], reason: str) -> None:
    assert reason in refusal(sentence_piece([], **changes))


def test_a_piece_of_a_million_characters_is_refused_and_not_cut_in_a_million_ways() -> None:
    assert "has 1000000 characters, limit 256" in refusal(sentence_piece([("a" * 10**6, -1.0)]))
