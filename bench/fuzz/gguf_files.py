"""GGUF files: header, metadata and places of tensors, for the engine and for the daemon."""

import struct

from pagedd.bench.fuzz.file_of import file_of
from pagedd.bench.fuzz.target import Target, check_refusal
from pagedd.client.errors import PageddError
from pagedd.daemon.gguf_metadata import read_metadata
from pagedd.daemon.gguf_tokenizer import build_tokenizer
from pagedd.engine.errors import EngineError
from pagedd.engine.model.gguf import GGUFCheckpoint
from pagedd.engine.model.gguf_file import GGUFFile

_UINT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 6, 7, 8, 9


def read(data: bytes) -> None:
    path = file_of(data, "gguf")
    try:
        file = GGUFFile(path)
        for entry in file.tensors.values():
            file.read(entry)
        GGUFCheckpoint(path)
    except EngineError as error:
        check_refusal(error)
    try:
        build_tokenizer(read_metadata(path))
    except PageddError as error:
        check_refusal(error)


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _key(name: str, kind: int, value: bytes) -> bytes:
    return _text(name) + struct.pack("<I", kind) + value


def _file(keys: list[bytes], tensors: list[bytes], tail: bytes, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys)) + b"".join(keys + tensors) + tail


_KEYS = [
    _key("general.architecture", _STRING, _text("llama")),
    _key("general.alignment", _UINT32, struct.pack("<I", 32)),
    _key("llama.block_count", _UINT32, struct.pack("<I", 1)),
    _key("llama.embedding_length", _UINT32, struct.pack("<I", 4)),
    _key("llama.feed_forward_length", _UINT32, struct.pack("<I", 4)),
    _key("llama.attention.head_count", _UINT32, struct.pack("<I", 1)),
    _key("llama.attention.layer_norm_rms_epsilon", _FLOAT32, struct.pack("<f", 1e-5)),
    _key("llama.context_length", _UINT32, struct.pack("<I", 16)),
    _key("tokenizer.ggml.model", _STRING, _text("gpt2")),
    _key("tokenizer.ggml.pre", _STRING, _text("smollm")),
    _key("tokenizer.ggml.tokens", _ARRAY, struct.pack("<IQ", _STRING, 2) + _text("a") + _text("b")),
    _key("tokenizer.ggml.merges", _ARRAY, struct.pack("<IQ", _STRING, 1) + _text("a b")),
    _key("tokenizer.ggml.add_bos_token", _BOOL, b"\x01"),
]
_TENSOR = _text("token_embd.weight") + struct.pack("<IQQIQ", 2, 4, 2, 0, 0)

_SEEDS = [_file(_KEYS, [_TENSOR], bytes(96)), _file(_KEYS[:3], [], b""), _file([], [], b"", version=2)]
TARGET = Target(read, _SEEDS, weight=1)
