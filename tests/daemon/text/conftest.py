"""Two tokenizers: the real model's byte-level one, and a small SentencePiece one with byte fallback."""

from pathlib import Path

import msgspec
import pytest
from tokenizers import Tokenizer

from pagedd.daemon.gguf_tokenizer import build_tokenizer
from pagedd.daemon.prepare import prepare
from pagedd.daemon.prepared import PreparedModel
from pagedd.daemon.text.tokenizer import TextTokenizer


@pytest.fixture(scope="session")
def prepared_folder(model_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(model_gguf, tmp_path_factory.mktemp("prepared"))


@pytest.fixture(scope="session")
def tokenizer(prepared_folder: Path) -> TextTokenizer:
    return TextTokenizer(prepared_folder)


@pytest.fixture(scope="session")
def reference(prepared_folder: Path) -> Tokenizer:
    """The library's own view of the same file."""
    return Tokenizer.from_file(str(prepared_folder / "tokenizer.json"))


@pytest.fixture(scope="session")
def byte_fallback_tokenizer(byte_fallback_folder: Path) -> TextTokenizer:
    return TextTokenizer(byte_fallback_folder)


@pytest.fixture(scope="session")
def byte_fallback_reference(byte_fallback_folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(byte_fallback_folder / "tokenizer.json"))


@pytest.fixture(scope="session")
def byte_fallback_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ids 0-2 control tokens, 3-258 the bytes, then pieces. Wants `<s>` before a plain text."""
    pieces = ["▁", "a", "b", "▁a", "ab", "▁ab", "世", "é", "<", "s", ">"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(pieces))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    built = build_tokenizer(metadata)
    folder = tmp_path_factory.mktemp("byte-fallback")
    prepared = PreparedModel(
        name="byte-fallback",
        weights="none",
        architecture="llama",
        quantization="F32",
        context_length=64,
        vocab_size=built.vocab_size,
        bos_token_id=built.bos_token_id,
        adds_bos=built.adds_bos,
        eos_token_ids=built.eos_token_ids,
        chat_template=None,
        special_tokens=built.special_tokens,
        template_variables=built.template_variables,
    )
    (folder / "tokenizer.json").write_text(built.tokenizer.to_str(), encoding="utf-8")
    (folder / "model.json").write_bytes(msgspec.json.encode(prepared))
    return folder
