"""config.json of the Llama family: defaults, spellings, and what is refused by name."""

from contextlib import suppress

import pytest

from pagedd.engine.errors import EngineError
from pagedd.engine.model.config import parse_decoder_config

LLAMA = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": None,
    "max_position_embeddings": 256,
}


def parse(**changes):
    return parse_decoder_config(LLAMA | changes)


def test_llama_has_transformers_defaults() -> None:
    config = parse()
    assert (config.num_kv_heads, config.head_dim, config.max_position) == (6, 8, 256)
    assert (config.rms_norm_eps, config.rope.theta, config.rope.kind) == (1e-6, 10_000.0, "default")
    assert {config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm} == {False}
    assert not config.tie_word_embeddings
    assert config.layer_windows == (None,) * 4
    assert config.eos_token_ids == ()


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_defaults_are_those_of_transformers_own_config(architecture) -> None:
    from transformers import AutoConfig

    theirs = AutoConfig.for_model(architecture)
    required = {name: getattr(theirs, name) for name in LLAMA if not name.startswith(("model", "max", "num_key"))}
    ours = parse_decoder_config({"model_type": architecture} | required)
    assert ours.max_position == theirs.max_position_embeddings
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.head_dim == getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert set(ours.layer_windows) == {theirs.sliding_window if architecture == "mistral" else None}


@pytest.mark.parametrize("window", [0, -4096, "4096", True])
def test_a_window_that_is_no_length_is_refused(window) -> None:
    with pytest.raises(EngineError, match=f"model_unavailable: config.json: sliding_window is {window!r}"):
        parse(model_type="mistral", sliding_window=window)


def test_biases_and_norms_follow_the_architecture() -> None:
    assert parse(attention_bias=True).qkv_bias
    assert parse(attention_bias=True).output_bias
    assert parse(mlp_bias=True).mlp_bias
    qwen2 = parse(model_type="qwen2")
    assert qwen2.qkv_bias
    assert not qwen2.output_bias
    qwen3 = parse(model_type="qwen3")
    assert qwen3.qk_norm
    assert qwen3.head_dim == 128
    assert not qwen3.qkv_bias


def test_ends_of_sequence_are_one_id_or_a_list() -> None:
    assert parse(eos_token_id=7).eos_token_ids == (7,)
    assert parse(eos_token_id=[7, 9]).eos_token_ids == (7, 9)


def test_mistral_windows_all_layers_by_default_and_none_for_null() -> None:
    assert parse(model_type="mistral").layer_windows == (4096,) * 4
    assert parse(model_type="mistral", sliding_window=None).layer_windows == (None,) * 4


def test_qwen_windows_only_when_told_to_and_only_the_upper_layers() -> None:
    assert parse(model_type="qwen2", sliding_window=8).layer_windows == (None,) * 4
    told = {"use_sliding_window": True, "sliding_window": 8}
    assert parse(model_type="qwen2", max_window_layers=3, **told).layer_windows == (None, None, None, 8)
    kinds = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    assert parse(model_type="qwen3", layer_types=kinds, **told).layer_windows == (8, None, None, 8)


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_rope_scaling_is_read_under_both_keys_and_in_both_places(key, place) -> None:
    scaling = {key: "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = parse(rope_theta=500_000.0, **{place: scaling | {"original_max_position_embeddings": 64}}).rope
    assert (rope.kind, rope.factor, rope.theta, rope.original_max_position) == ("llama3", 8.0, 500_000.0, 64)


def test_theta_inside_rope_parameters_wins() -> None:
    assert parse(rope_theta=1.0, rope_parameters={"rope_type": "default", "rope_theta": 5.0}).rope.theta == 5.0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gpt2"}, "architecture 'gpt2'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope type 'longrope'"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "rope type 'spiral'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config 'awq'"),
        ({"model_type": "mistral", "layer_types": ["full_attention"] * 4}, "layer_types in mistral"),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "layer_types": ["linear_attention"] * 4},
            "linear_attention",
        ),
        ({"head_dim": 7}, "odd head_dim 7"),
    ],
)
def test_what_is_not_exact_is_refused_by_name(changes, named) -> None:
    with pytest.raises(EngineError) as refusal:
        parse(**changes)
    assert refusal.value.code == "unsupported_model"
    assert named in refusal.value.message


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"vocab_size": None}, "vocab_size is None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers is '4'"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
        ({"model_type": None}, "model_type is None"),
        ({"num_key_value_heads": 4}, "6 query heads do not divide among 4 KV heads"),
        ({"rope_scaling": {"type": "linear"}}, "'linear' has no factor"),
    ],
)
def test_a_value_that_cannot_be_is_told_apart_from_one_that_is_not_implemented(changes, named) -> None:
    with pytest.raises(EngineError) as refusal:
        parse(**changes)
    assert refusal.value.code == "model_unavailable"
    assert named in refusal.value.message


WRONG = ["", "x", [], {}, True, 1.5, -1, 1e400, float("nan"), 10**400, [1, "x"], {"rope_type": []}, "x" * 100_000]
READ = [
    *("model_type", "hidden_act", "quantization_config", "num_hidden_layers", "num_attention_heads", "hidden_size"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "attention_bias", "vocab_size", "eos_token_id"),
    *("intermediate_size", "rms_norm_eps", "tie_word_embeddings", "mlp_bias", "sliding_window", "use_sliding_window"),
    *("layer_types", "max_window_layers", "rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor"),
    "original_max_position_embeddings",
]
READ_OF_ROPE = [
    *("rope_type", "type", "factor", "rope_theta", "original_max_position_embeddings", "low_freq_factor"),
    *("high_freq_factor", "attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate"),
    *("frequency_divisors", "partial_rotary_factor"),
]


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_value_of_any_wrong_kind_under_any_key_is_taken_or_refused(architecture: str) -> None:
    def attempt(**changes: object) -> None:
        with suppress(EngineError):
            parse(**({"model_type": architecture} | changes))

    for value in WRONG:
        for key in READ:
            attempt(**{key: value})
            attempt(use_sliding_window=True, **({} if key == "use_sliding_window" else {key: value}))
        for key in READ_OF_ROPE:
            for kind in ("default", "linear", "llama3", "yarn"):
                attempt(rope_scaling={"rope_type": kind, "factor": 2.0} | {key: value})


def test_a_long_value_is_refused_in_few_words() -> None:
    with pytest.raises(EngineError) as refusal:
        parse(rms_norm_eps="x" * 100_000)
    assert len(str(refusal.value)) < 200


def test_a_number_of_layers_that_no_model_has_is_refused_before_it_costs_memory() -> None:
    with pytest.raises(EngineError, match="num_hidden_layers is 2000000000, not a whole number from 1 to 4096"):
        parse(num_hidden_layers=2_000_000_000)
