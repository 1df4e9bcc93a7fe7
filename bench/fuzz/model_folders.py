"""A folder of Hugging Face's kind: config.json, the index of shards, and a safetensors file's header."""

import json
import struct
import tempfile
from functools import cache
from pathlib import Path

from pagedd.bench.fuzz.target import Target, check_refusal
from pagedd.engine.errors import EngineError
from pagedd.engine.model.config import parse_decoder_config, parse_eos
from pagedd.engine.model.safetensors import SafetensorsCheckpoint, read_json

_INDEX = "model.safetensors.index.json"


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="pagedd-fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)


def read(data: bytes) -> None:
    """The first byte says what the others are."""
    kind, data = data[:1], data[1:]
    folder = Path(_folder().name)
    try:
        match kind:
            case b"c":
                (folder / "config.json").write_bytes(data)
                raw = read_json(folder / "config.json")
                parse_eos(raw)
                parse_decoder_config(raw)
            case b"i":
                (folder / _INDEX).write_bytes(data)
                try:
                    SafetensorsCheckpoint(folder)
                finally:
                    (folder / _INDEX).unlink()
            case _:
                (folder / "model.safetensors").write_bytes(data)
                checkpoint = SafetensorsCheckpoint(folder)
                if "first" in checkpoint:
                    checkpoint.get("first")
    except EngineError as error:
        check_refusal(error)


def _safetensors(header: object, tail: bytes) -> bytes:
    text = json.dumps(header).encode()
    return b"s" + struct.pack("<Q", len(text)) + text + tail


_CONFIG = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "eos_token_id": [1, 2],
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_TENSOR = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}

TARGET = Target(
    read,
    [
        b"c" + json.dumps(_CONFIG).encode(),
        b"i" + json.dumps({"weight_map": {"first": "model.safetensors"}}).encode(),
        _safetensors({"first": _TENSOR, "__metadata__": {"format": "pt"}}, bytes(16)),
        _safetensors({"first": _TENSOR}, b""),
    ],
    weight=2,
)
