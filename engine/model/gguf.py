"""GGUF files: metadata as config.json's keys, tensors dequantized under transformers' names.

Owns the translation. The bytes are `gguf_file.py`'s, what the values mean is `config.py`'s, dequantizing is the `gguf`
library's. An architecture, a metadata key of it, a tensor or a quantization type that is not known is refused by name.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from gguf import GGMLQuantizationType, dequantize
from numpy.typing import NDArray

from pagedd.engine.model.config import DecoderConfig, parse_decoder_config
from pagedd.engine.model.gguf_blocks import read_blocks, read_nested_blocks
from pagedd.engine.model.gguf_file import GGUFFile
from pagedd.engine.model.json_fields import malformed, unsupported
from pagedd.engine.model.weight_blocks import NestedBlocks, WeightBlocks

Blocks = TypeVar("Blocks", WeightBlocks, NestedBlocks)

_ARCHITECTURES = ("llama", "qwen2", "qwen3")

# Key after the architecture's name → config.json's key.
_CONFIG_KEYS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_ROPE_KEYS = {
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
# Checked against the other values, or of no effect on the arithmetic.
_OTHER_KEYS = {"vocab_size", "rope.dimension_count", "attention.value_length", "rope.scaling.finetuned"}

_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FLOAT_TYPES = {GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16}
_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ROPE_DIVISORS = "rope_freqs.weight"  # llama 3's scaling as the file carries it: what each frequency is divided by


class GGUFCheckpoint:
    """One GGUF file. `config` is parsed when it is opened."""

    def __init__(self, path: Path) -> None:
        self._file = GGUFFile(path)
        self._metadata = self._file.metadata
        self._architecture = str(self._metadata.get("general.architecture"))
        if self._architecture not in _ARCHITECTURES:
            raise unsupported(f"GGUF architecture {self._architecture!r}", f"choose one of {', '.join(_ARCHITECTURES)}")
        self._tensors = {_transformers_name(name): entry for name, entry in self._file.tensors.items()}
        self.config = self._parse_config()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def get(self, name: str) -> torch.Tensor:
        """The tensor in float32, in the order of rows that transformers uses."""
        entry = self._tensors[name]
        try:
            values = dequantize(self._file.read(entry), entry.type)
        except NotImplementedError as error:
            raise unsupported(f"GGUF tensor type {entry.type.name} of {entry.name}") from error
        order = self._rotary_order(name, len(values))
        if order is not None:
            values = values[order]
        return torch.from_numpy(values if values.flags.writeable else values.copy())  # float32 comes as a view

    def blocks(self, name: str) -> WeightBlocks | None:
        """The matrix as the file quantizes it, rows as in `get`; `None` when it has no such form."""
        return self._in_rotary_order(name, read_blocks)

    def nested_blocks(self, name: str) -> NestedBlocks | None:
        """The same of a K-quant."""
        return self._in_rotary_order(name, read_nested_blocks)

    def _in_rotary_order(
        self, name: str, read: Callable[[NDArray[np.uint8], GGMLQuantizationType], Blocks | None]
    ) -> Blocks | None:
        entry = self._tensors[name]
        if len(entry.shape) != 2:
            return None
        blocks = read(self._file.read(entry), entry.type)
        order = self._rotary_order(name, entry.shape[0])
        return blocks if blocks is None or order is None else blocks.take_rows(order)

    def is_quantized(self, name: str) -> bool:
        """Held in fewer than 16 bits a weight."""
        return self._tensors[name].type not in _FLOAT_TYPES

    def least_bytes(self, itemsize: int) -> int:
        """What the tensors take at least, of so many bytes a number or as they are quantized, told from the header."""
        return sum(min(entry.num_bytes, math.prod(entry.shape) * itemsize) for entry in self._tensors.values())

    def _rotary_order(self, name: str, num_rows: int) -> NDArray[np.int64] | None:
        """llama.cpp interleaves the two halves of every llama query and key head; transformers keeps them apart."""
        if self._architecture != "llama":
            return None
        if ".self_attn.q_proj." in name:
            num_heads = self.config.num_heads
        elif ".self_attn.k_proj." in name:
            num_heads = self.config.num_kv_heads
        else:
            return None
        return np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)

    def _parse_config(self) -> DecoderConfig:
        raw: dict[str, Any] = {"model_type": self._architecture}
        rope: dict[str, Any] = {}
        prefix = f"{self._architecture}."
        for key, value in self._metadata.items():
            name = key.removeprefix(prefix)
            if name == key or name in _OTHER_KEYS:
                continue
            if name in _CONFIG_KEYS:
                raw[_CONFIG_KEYS[name]] = value
            elif name in _ROPE_KEYS:
                rope[_ROPE_KEYS[name]] = value
            elif value:  # a count or a switch that is 0 changes nothing
                raise unsupported(f"GGUF key {key} = {value!r}")
        if rope.get("rope_type") == "none":
            rope = {}
        if _ROPE_DIVISORS in self._tensors:
            if rope:
                raise unsupported(f"GGUF tensor {_ROPE_DIVISORS} beside rope scaling {rope['rope_type']!r}")
            rope = {"frequency_divisors": self.get(_ROPE_DIVISORS).tolist()}
        embedding = self._tensors.get("model.embed_tokens.weight")
        if embedding is None:
            raise malformed("the GGUF file has no tensor token_embd.weight")
        raw |= {
            "vocab_size": embedding.shape[0],
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            "rope_scaling": rope,
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in self._tensors,
            "mlp_bias": "model.layers.0.mlp.up_proj.bias" in self._tensors,
            "eos_token_id": [
                self._metadata[key]
                for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
                if key in self._metadata
            ],
        }
        config = parse_decoder_config(raw)
        for name in ("rope.dimension_count", "attention.value_length"):
            size = self._metadata.get(prefix + name, config.head_dim)
            if size != config.head_dim:
                raise unsupported(f"GGUF key {prefix}{name} = {size} with heads of {config.head_dim}")
        return config


def _transformers_name(name: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`."""
    if name == _ROPE_DIVISORS:
        return name
    stem, _, kind = name.rpartition(".")
    if stem.startswith("blk."):
        _, layer, part = stem.split(".", 2)
        if part in _LAYER_TENSORS:
            return f"model.layers.{layer}.{_LAYER_TENSORS[part]}.{kind}"
    elif stem in _TENSORS:
        return f"{_TENSORS[stem]}.{kind}"
    raise unsupported(f"GGUF tensor {name}")
