"""What a model is, as numbers: parsed from config.json or from GGUF metadata. No torch, no transformers.

`ModelConfig` is what the engine needs of any model; `DecoderConfig` adds what the fused decoder needs. Everything that
the fused decoder would not compute exactly is refused here, by name. GGUF metadata is translated to the keys of
config.json by `gguf.py`, so that there is one parser. The rotation itself is in `rope.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pagedd.engine.errors import EngineError

FUSED_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")


def unsupported(what: str, advice: str = "choose another model") -> EngineError:
    return EngineError("unsupported_model", f"{what} is not implemented exactly; {advice}")


def malformed(what: str) -> EngineError:
    return EngineError("model_unavailable", f"{what}; fetch the model again")


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
    fields = _Fields(raw)
    architecture = fields.text("model_type")
    if architecture not in FUSED_ARCHITECTURES:
        raise unsupported(f"architecture {architecture!r}")
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise unsupported(f"hidden_act {activation!r} in {architecture}")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unnamed")
        raise unsupported(f"quantization_config {method!r}", "choose an unquantized folder or a GGUF file")

    num_layers = fields.count("num_hidden_layers")
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
    has_bias = bool(raw.get("attention_bias", False)) if architecture in ("llama", "qwen3") else False
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
        rope=_parse_rope(raw, max_position),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=has_bias or architecture == "qwen2",
        output_bias=has_bias,
        mlp_bias=architecture == "llama" and bool(raw.get("mlp_bias", False)),
        qk_norm=architecture == "qwen3",
        layer_windows=_parse_windows(raw, architecture, num_layers),
    )


def parse_eos(raw: Mapping[str, Any]) -> tuple[int, ...]:
    eos = raw.get("eos_token_id")
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (int(eos),)


# What transformers takes where the key is absent; null means as many as query heads.
_DEFAULT_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}
_DEFAULT_MAX_POSITION = {"llama": 2048, "mistral": 4096 * 32, "qwen2": 32768, "qwen3": 32768}


class _Fields:
    """config.json's values, checked for type and range as they are read."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._raw = raw

    def count(self, name: str, default: int | None = None) -> int:
        value = self._raw.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise malformed(f"config.json: {name} is {value!r}, not a positive integer")
        return value

    def number(self, name: str, default: float) -> float:
        value = self._raw.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise malformed(f"config.json: {name} is {value!r}, not a number")
        return float(value)

    def text(self, name: str) -> str:
        value = self._raw.get(name)
        if not isinstance(value, str):
            raise malformed(f"config.json: {name} is {value!r}, not a name")
        return value


def _parse_windows(raw: Mapping[str, Any], architecture: str, num_layers: int) -> tuple[int | None, ...]:
    """Which layers look back no further than a window, under each architecture's own rule."""
    if architecture == "llama":
        return (None,) * num_layers
    window = None if raw.get("sliding_window", 4096) is None else _Fields(raw).count("sliding_window", 4096)
    if architecture == "mistral":
        if raw.get("layer_types"):
            raise unsupported("layer_types in mistral")
        return (window,) * num_layers
    if not raw.get("use_sliding_window", False) or window is None:
        return (None,) * num_layers
    kinds = raw.get("layer_types")
    if kinds is None:
        first = raw.get("max_window_layers", 28)
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    if unknown or len(kinds) != num_layers:
        raise unsupported(f"layer_types {sorted(set(kinds))} for {num_layers} layers")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _parse_rope(raw: Mapping[str, Any], max_position: int) -> RopeConfig:
    """Both spellings: `rope_parameters` (transformers 5), and `rope_theta` with `rope_scaling` (before)."""
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    fields = _Fields(given)
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise unsupported(f"rope type {kind!r}")
    partial = given.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise unsupported(f"partial_rotary_factor {partial}")
    if kind != "default" and given.get("factor") is None:
        raise malformed(f"config.json: rope type {kind!r} has no factor")
    # A top-level length wins over the nested one, as in transformers.
    original = raw.get("original_max_position_embeddings") or given.get("original_max_position_embeddings")
    divisors = given.get("frequency_divisors")
    return RopeConfig(
        kind=kind,
        theta=fields.number("rope_theta", _Fields(raw).number("rope_theta", 10_000.0)),
        factor=fields.number("factor", 1.0),
        original_max_position=original or max_position,
        low_freq_factor=fields.number("low_freq_factor", 1.0),
        high_freq_factor=fields.number("high_freq_factor", 4.0),
        attention_factor=given.get("attention_factor"),
        mscale=given.get("mscale"),
        mscale_all_dim=given.get("mscale_all_dim"),
        beta_fast=given.get("beta_fast") or 32.0,
        beta_slow=given.get("beta_slow") or 1.0,
        truncate=bool(given.get("truncate", True)),
        frequency_divisors=None if divisors is None else tuple(divisors),
    )
