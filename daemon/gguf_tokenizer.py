"""Builds the exact tokenizer that a GGUF file describes, in the Hugging Face `tokenizers` format.

Owns the table of pre-tokenizers that pagedd knows. A `tokenizer.ggml.model` or `.pre` outside it is refused by name: a
near miss would give other token ids than the model was trained on, silently. Reading the file is `gguf_metadata.py`'s,
keeping the result `models.py`'s.

Sources: the tokenizer.json of each model family, and llama.cpp's `llama-vocab.cpp` for what the GGUF names mean.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, cast

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from pagedd.client.errors import PageddError
from pagedd.daemon.gguf_metadata import GgufValue

# tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

_WORD_BOUNDARY = "▁"  # U+2581, SentencePiece's visible space

# SentencePiece stops at 16 by default, runs of spaces at a few dozen. The work grows with the square of the length.
_MAX_PIECE_CHARS = 256

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BytePairRules:
    """How text becomes the words that byte-level merges run on, and what else the vocabulary's family fixes.

    Attributes:
        ignore_merges: a word that is a token as a whole is taken as it is, whatever the merges say.
        adds_bos: used when the file does not say.
    """

    pre_tokenizer: Callable[[], PreTokenizer]
    normalizer: Callable[[], Normalizer] | None = None
    ignore_merges: bool = False
    adds_bos: bool = False


def _gpt2_words() -> PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_gpt2_words() -> PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2_words()])


def _split_words(pattern: str) -> Callable[[], PreTokenizer]:
    def build() -> PreTokenizer:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return build


_LLAMA3 = BytePairRules(
    _split_words(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    ignore_merges=True,
    adds_bos=True,
)

# tokenizer.ggml.pre -> rules
BYTE_PAIR_RULES: dict[str, BytePairRules] = {
    "gpt-2": BytePairRules(_gpt2_words),
    "smollm": BytePairRules(_digits_then_gpt2_words),
    "starcoder": BytePairRules(_digits_then_gpt2_words),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": BytePairRules(
        _split_words(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        normalizer=normalizers.NFC,
    ),
}


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """The tokenizer and the facts beside it. Ids are indices into the file's own token list.

    Attributes:
        adds_bos: a plain text begins with `bos_token_id`.
        eos_token_ids: every id that the file declares as an end: of sequence, of turn, of message.
        special_tokens: text -> id of control tokens.
        template_variables: `bos_token`, `eos_token`, ... as text, for the chat template.
    """

    tokenizer: Tokenizer
    vocab_size: int
    bos_token_id: int | None
    adds_bos: bool
    eos_token_ids: list[int]
    chat_template: str | None
    special_tokens: dict[str, int]
    template_variables: dict[str, str]


def build_tokenizer(metadata: dict[str, GgufValue]) -> GgufTokenizer:
    """The tokenizer of a GGUF file with these `metadata`.

    Raises:
        PageddError: `unsupported_model` when the keys are absent, contradict each other, or name something that
            pagedd does not know exactly.
    """
    vocabulary = _Vocabulary.read(metadata)
    model = _get(metadata, "tokenizer.ggml.model", str)
    if model == "gpt2":
        pre = _get(metadata, "tokenizer.ggml.pre", str)
        if pre not in BYTE_PAIR_RULES:
            raise _unsupported(f"tokenizer.ggml.pre {pre!r} is not one of {sorted(BYTE_PAIR_RULES)}")
        rules = BYTE_PAIR_RULES[pre]
        tokenizer = _byte_pair(vocabulary, rules, _list(metadata, "tokenizer.ggml.merges", str))
        adds_bos_by_default = rules.adds_bos
    elif model == "llama":
        tokenizer = _sentence_piece(vocabulary, metadata)
        adds_bos_by_default = True
    else:
        raise _unsupported(f"tokenizer.ggml.model {model!r} is not one of ['gpt2', 'llama']")
    _add_tokens(tokenizer, vocabulary)

    bos_token_id = vocabulary.optional_id(metadata, "tokenizer.ggml.bos_token_id")
    adds_bos = _optional(metadata, "tokenizer.ggml.add_bos_token", bool)
    ends = [vocabulary.optional_id(metadata, f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return GgufTokenizer(
        tokenizer=tokenizer,
        vocab_size=len(vocabulary.tokens),
        bos_token_id=bos_token_id,
        adds_bos=bos_token_id is not None and (adds_bos_by_default if adds_bos is None else adds_bos),
        eos_token_ids=sorted({token_id for token_id in ends if token_id is not None}),
        chat_template=_optional(metadata, "tokenizer.chat_template", str),
        special_tokens=vocabulary.of_types(_CONTROL, _UNKNOWN),
        template_variables={
            name: vocabulary.tokens[token_id]
            for name, key in (
                ("bos_token", "bos"),
                ("eos_token", "eos"),
                ("unk_token", "unknown"),
                ("pad_token", "padding"),
            )
            if (token_id := vocabulary.optional_id(metadata, f"tokenizer.ggml.{key}_token_id")) is not None
        },
    )


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    tokens: list[str]
    types: list[int]

    @classmethod
    def read(cls, metadata: dict[str, GgufValue]) -> "_Vocabulary":
        tokens = _list(metadata, "tokenizer.ggml.tokens", str)
        types = _list(metadata, "tokenizer.ggml.token_type", int)
        if not tokens:
            raise _unsupported("tokenizer.ggml.tokens is empty")
        if len(types) != len(tokens):
            raise _unsupported(f"{len(tokens)} tokens have {len(types)} token types")
        [(twice, times)] = Counter(tokens).most_common(1)
        if times > 1:
            raise _unsupported(f"the token {twice!r} stands twice in its vocabulary")
        return cls(tokens, types)

    def of_types(self, *types: int) -> dict[str, int]:
        return {self.tokens[i]: i for i, token_type in enumerate(self.types) if token_type in types}

    def optional_id(self, metadata: dict[str, GgufValue], key: str) -> int | None:
        token_id = _optional(metadata, key, int)
        if token_id is not None and not 0 <= token_id < len(self.tokens):
            raise _unsupported(f"{key} {token_id} is outside its vocabulary of {len(self.tokens)}")
        return token_id


def _byte_pair(vocabulary: _Vocabulary, rules: BytePairRules, merge_lines: list[str]) -> Tokenizer:
    """Byte-level BPE. Unused ids get no text; control tokens keep theirs, which `TextTokenizer` seals off."""
    tokens = vocabulary.of_types(_NORMAL, _CONTROL, _UNKNOWN, _USER_DEFINED)
    merges = []
    for line in merge_lines:
        left, _, right = line.partition(" ")
        if left not in tokens or right not in tokens or left + right not in tokens:
            raise _unsupported(f"the merge {line!r} names a token outside its vocabulary")
        merges.append((left, right))
    tokenizer = Tokenizer(BPE(vocab=tokens, merges=merges, ignore_merges=rules.ignore_merges))
    if rules.normalizer is not None:
        tokenizer.normalizer = rules.normalizer()
    tokenizer.pre_tokenizer = rules.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(vocabulary: _Vocabulary, metadata: dict[str, GgufValue]) -> Tokenizer:
    """SentencePiece BPE with byte fallback, as transformers' converter of the Llama tokenizer makes it."""
    if _optional(metadata, "tokenizer.ggml.remove_extra_whitespaces", bool):
        raise _unsupported("its tokenizer removes extra whitespace (tokenizer.ggml.remove_extra_whitespaces)")
    scores = _list(metadata, "tokenizer.ggml.scores", float)
    if len(scores) != len(vocabulary.tokens):
        raise _unsupported(f"{len(vocabulary.tokens)} tokens have {len(scores)} scores")
    bytes_ = vocabulary.of_types(_BYTE)
    if set(bytes_) != {f"<0x{byte:02X}>" for byte in range(256)}:
        raise _unsupported(f"its vocabulary has {len(bytes_)} byte tokens, not <0x00> to <0xFF>")
    unknown = vocabulary.of_types(_UNKNOWN)
    if len(unknown) != 1:
        raise _unsupported(f"its vocabulary has {len(unknown)} unknown tokens, not one")

    tokens = vocabulary.of_types(_NORMAL, _CONTROL, _UNKNOWN, _USER_DEFINED, _BYTE)
    merges = _merges_of_scores(vocabulary.of_types(_NORMAL), scores)
    model = BPE(vocab=tokens, merges=merges, unk_token=next(iter(unknown)), fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    spaces = normalizers.Replace(" ", _WORD_BOUNDARY)
    fragments: list[decoders.Decoder] = [
        decoders.Replace(_WORD_BOUNDARY, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if _optional(metadata, "tokenizer.ggml.add_space_prefix", bool) is False:
        tokenizer.normalizer = spaces
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_WORD_BOUNDARY), spaces])
        fragments.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(fragments)
    return tokenizer


def _merges_of_scores(pieces: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a piece of two pieces, best score first; among equal scores the one of lower ids."""
    ranked = []
    for piece, piece_id in pieces.items():
        if len(piece) > _MAX_PIECE_CHARS:
            raise _unsupported(f"the token {piece_id} has {len(piece)} characters, limit {_MAX_PIECE_CHARS}")
        for cut in range(1, len(piece)):
            left, right = pieces.get(piece[:cut]), pieces.get(piece[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[piece_id], piece_id, left, right, piece[:cut], piece[cut:]))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _add_tokens(tokenizer: Tokenizer, vocabulary: _Vocabulary) -> None:
    special = [AddedToken(text, special=True, normalized=False) for text in vocabulary.of_types(_CONTROL, _UNKNOWN)]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in vocabulary.of_types(_USER_DEFINED)])


def _optional(metadata: dict[str, GgufValue], key: str, kind: type[T]) -> T | None:
    value = metadata.get(key)
    if value is None:
        return None
    if type(value) is not kind:
        raise _unsupported(f"{key} is a {type(value).__name__}, not a {kind.__name__}")
    return value


def _get(metadata: dict[str, GgufValue], key: str, kind: type[T]) -> T:
    value = _optional(metadata, key, kind)
    if value is None:
        raise _unsupported(f"it has no {key}")
    return value


def _list(metadata: dict[str, GgufValue], key: str, kind: type[T]) -> list[T]:
    values: list[GgufValue] = _get(metadata, key, list)
    if any(type(value) is not kind for value in values):
        raise _unsupported(f"{key} holds something else than {kind.__name__} values")
    return cast(list[T], values)


def _unsupported(why: str) -> PageddError:
    return PageddError(
        "unsupported_model", f"this GGUF file cannot be served exactly: {why}; use the model's safetensors folder"
    )
