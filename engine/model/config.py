"""What a model is, as numbers: parsed from config.json or from GGUF metadata. No torch, no transformers.

`ModelConfig` is what the engine needs of any model; `DecoderConfig` adds what the fused decoder needs. Everything that
the fused decoder would not compute exactly is refused here, by name. GGUF metadata is translated to the keys of
config.json by `gguf.py`, so that there is one parser. The rotation itself is in `rope.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pagedd.engine.model.json_fields import JsonFields, malformed, shown, unsupported

FUSED_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")


# A layer costs memory before any weight is seen.
_MOST_LAYERS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What pool, scheduler and sampler need to know of a model.

    Attributes:
        architecture: transformers' `model_type`.
        max_position: longest context that the model was made for.
        eos_token_ids: the model's own ends of sequence, as far as its weights' folder or file names them.
    """

    architecture: str
    vocab_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary frequencies and their scaling. Fields past `theta` mean something for some types only; see `rope.py`.

    Attributes:
        kind: `default`, `linear`, `llama3` or `yarn`.
        attention_factor: yarn's factor on cosines and sines; None derives it from `factor` and the mscales.
        frequency_divisors: llama3 as a GGUF carries it: what each inverse frequency is divided by.
    """

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    frequency_divisors: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """The Llama family: RMSNorm, rope, grouped-query attention, SwiGLU.

    Attributes:
        qk_norm: RMSNorm on every query and key head (Qwen 3).
        layer_windows: sliding window of each layer, None for full attention.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    rms_norm_eps: float
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    layer_windows: tuple[int | None, ...]


def parse_decoder_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads config.json (already decoded) of one of `FUSED_ARCHITECTURES`; defaults are transformers'.

    Raises:
        EngineError: `unsupported_model` names what is not implemented; `model_unavailable` a value that cannot be.
    """
    fields = JsonFields(raw)
    architecture = fields.text("model_type")
    if architecture not in FUSED_ARCHITECTURES:
        raise unsupported(f"architecture {shown(architecture)}")
    activation = fields.text("hidden_act", "silu")
    if activation != "silu":
        raise unsupported(f"hidden_act {shown(activation)} in {architecture}")
    if raw.get("quantization_config"):
        method = fields.part("quantization_config").text("quant_method", "unnamed")
        raise unsupported(f"quantization_config {shown(method)}", "choose an unquantized folder or a GGUF file")

    num_layers = fields.count("num_hidden_layers", most=_MOST_LAYERS)
    num_heads = fields.count("num_attention_heads")
    hidden_size = fields.count("hidden_size")
    absent_kv_heads = _DEFAULT_KV_HEADS.get(architecture, num_heads)
    num_kv_heads = fields.count("num_key_value_heads", num_heads if "num_key_value_heads" in raw else absent_kv_heads)
    head_dim = fields.count("head_dim", default=128 if architecture == "qwen3" else hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise malformed(f"config.json: {num_heads} query heads do not divide among {num_kv_heads} KV heads")
    if head_dim % 2:
        raise unsupported(f"odd head_dim {head_dim}")
    max_position = fields.count("max_position_embeddings", default=_DEFAULT_MAX_POSITION[architecture])
    has_bias = fields.flag("attention_bias") if architecture in ("llama", "qwen3") else False
    return DecoderConfig(
        architecture=architecture,
        vocab_size=fields.count("vocab_size"),
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        eos_token_ids=parse_eos(raw),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        num_heads=num_heads,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_parse_rope(fields, max_position),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=has_bias or architecture == "qwen2",
        output_bias=has_bias,
        mlp_bias=architecture == "llama" and fields.flag("mlp_bias"),
        qk_norm=architecture == "qwen3",
        layer_windows=_parse_windows(raw, architecture, num_layers),
    )


def parse_eos(raw: Mapping[str, Any]) -> tuple[int, ...]:
    """The ends of sequence of config.json or generation_config.json; raises like `parse_decoder_config`."""
    return JsonFields(raw).ids("eos_token_id")


# What transformers takes where the key is absent; null means as many as query heads.
_DEFAULT_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}
_DEFAULT_MAX_POSITION = {"llama": 2048, "mistral": 4096 * 32, "qwen2": 32768, "qwen3": 32768}


def _parse_windows(raw: Mapping[str, Any], architecture: str, num_layers: int) -> tuple[int | None, ...]:
    """Which layers look back no further than a window, under each architecture's own rule."""
    if architecture == "llama":
        return (None,) * num_layers
    fields = JsonFields(raw)
    window = None if raw.get("sliding_window", 4096) is None else fields.count("sliding_window", 4096)
    kinds = fields.texts("layer_types")
    if architecture == "mistral":
        if kinds:
            raise unsupported("layer_types in mistral")
        return (window,) * num_layers
    if not fields.flag("use_sliding_window") or window is None:
        return (None,) * num_layers
    if kinds is None:
        first = fields.number("max_window_layers", 28)
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    if unknown or len(kinds) != num_layers:
        raise unsupported(f"layer_types {shown(sorted(set(kinds)))} for {num_layers} layers")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _parse_rope(fields: JsonFields, max_position: int) -> RopeConfig:
    """Both spellings: `rope_parameters` (transformers 5), and `rope_theta` with `rope_scaling` (before)."""
    given = fields.part("rope_parameters" if "rope_parameters" in fields else "rope_scaling")
    kind = given.text("rope_type", given.text("type", "default"))
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise unsupported(f"rope type {shown(kind)}")
    partial = given.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if partial != 1:
        raise unsupported(f"partial_rotary_factor {partial}")
    if kind != "default" and "factor" not in given:
        raise malformed(f"config.json: rope type {kind!r} has no factor")
    length = "original_max_position_embeddings"
    return RopeConfig(
        kind=kind,
        theta=given.positive("rope_theta", fields.positive("rope_theta", 10_000.0)),
        factor=given.positive("factor", 1.0),
        # A top-level length wins over the nested one, as in transformers.
        original_max_position=fields.count(length, given.count(length, max_position)),
        low_freq_factor=given.positive("low_freq_factor", 1.0),
        high_freq_factor=given.positive("high_freq_factor", 4.0),
        attention_factor=given.optional_number("attention_factor"),
        mscale=given.optional_number("mscale"),
        mscale_all_dim=given.optional_number("mscale_all_dim"),
        beta_fast=given.positive("beta_fast", 32.0),
        beta_slow=given.positive("beta_slow", 1.0),
        truncate=given.flag("truncate", True),
        frequency_divisors=given.positives("frequency_divisors"),
    )
