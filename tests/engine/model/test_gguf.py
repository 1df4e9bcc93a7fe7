"""GGUF files written by the `gguf` package, against the transformers model whose weights they hold."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pagedd.engine.errors import EngineError
from pagedd.engine.model.config import parse_decoder_config
from pagedd.engine.model.decoder import Decoder
from pagedd.engine.model.gguf import GGUFCheckpoint
from pagedd.engine.model.gguf_blocks import read_blocks, read_nested_blocks
from pagedd.engine.model.linear import QuantizedLinear
from pagedd.engine.model.weight_blocks import NestedBlocks, WeightBlocks, concatenate_nested

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
}
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
Type = gguf.GGMLQuantizationType


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in TOP_NAMES:
        return f"{TOP_NAMES[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's order of the rows of a llama query or key head."""
    return weight.reshape(num_heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    model: Any,
    quantization: Type = Type.F32,
    change: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> None:
    """Writes `model`; matrices in `quantization`, and the model is left with what they dequantize to."""
    config, arch = model.config, model.config.model_type
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(SHAPE["head_dim"])
    writer.add_value_length(SHAPE["head_dim"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    writer.add_eos_token_id(5)
    writer.add_eot_token_id(7)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = weight.numpy()
        if arch == "llama" and "q_proj" in name:
            values = interleaved(values, config.num_attention_heads)
        elif arch == "llama" and "k_proj" in name:
            values = interleaved(values, config.num_key_value_heads)
        if values.ndim == 2 and quantization != Type.F32:
            packed = gguf.quantize(values, quantization)
            weight.copy_(torch.from_numpy(restored(name, gguf.dequantize(packed, quantization), config)))
            writer.add_tensor(gguf_name(name), packed, raw_dtype=quantization)
        else:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(values))
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def restored(name: str, values: np.ndarray, config: Any) -> np.ndarray:
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for part, num_heads in heads.items():
        if part in name and config.model_type == "llama":
            return values.reshape(num_heads, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    return values


def make_config(kind: str = "llama", **changes: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(kind, **(SHAPE | changes))


@pytest.fixture(scope="module")
def model(tiny):
    return tiny(make_config())[1]


def prompt() -> list[int]:
    return torch.randint(96, (21,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_equal_those_of_the_model_that_was_written(tiny, load, check_logits, tmp_path, kind, tied) -> None:
    _, model = tiny(make_config(kind, tie_word_embeddings=tied))
    write_gguf(tmp_path / "model.gguf", model)
    loaded = load(tmp_path / "model.gguf")
    assert loaded.config.architecture == kind
    assert loaded.config.tie_word_embeddings == tied
    assert loaded.config.vocab_size == 96
    check_logits(loaded, model, [prompt()], [{0: 12}, {0: 9}])


@pytest.mark.parametrize("quantization", [Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q8_0, Type.F16, Type.BF16])
def test_quantized_matrices_are_dequantized_exactly(tiny, load, check_logits, tmp_path, quantization) -> None:
    _, model = tiny(make_config())
    write_gguf(tmp_path / "model.gguf", model, quantization)
    check_logits(load(tmp_path / "model.gguf"), model, [prompt()], [{0: 21}])


@pytest.mark.parametrize("quantization", [Type.Q4_K, Type.Q6_K])
def test_superblock_types_are_dequantized_by_the_library(model, tmp_path, quantization) -> None:
    # The package does not quantize these, so a tensor of random blocks (scales kept finite) stands beside the others.
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[quantization]
    rows = np.random.default_rng(0).integers(0, 64, (3, 2 * block_bytes), dtype=np.uint8)

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.2.ffn_up.weight", rows, raw_dtype=quantization)

    write_gguf(tmp_path / "model.gguf", model, change=add)
    tensor = GGUFCheckpoint(tmp_path / "model.gguf").get("model.layers.2.mlp.up_proj.weight")
    assert tensor.shape == (3, 2 * block_values)
    assert torch.equal(tensor, torch.from_numpy(gguf.dequantize(rows, quantization)))


def random_superblocks(quantization: Type, num_rows: int, num_blocks: int, seed: int = 0) -> np.ndarray:
    """Bytes of rows whose factors are finite: every float16 begins with a small exponent."""
    _, block_bytes = gguf.GGML_QUANT_SIZES[quantization]
    blocks = np.random.default_rng(seed).integers(0, 256, (num_rows, num_blocks, block_bytes), dtype=np.uint8)
    starts = [208] if quantization is Type.Q6_K else [0, 2]
    for start in starts:
        blocks[..., start + 1] &= 0xA7
    return blocks.reshape(num_rows, -1)


@pytest.mark.parametrize("quantization", [Type.Q4_K, Type.Q5_K, Type.Q6_K])
def test_superblocks_are_read_as_they_are(quantization) -> None:
    rows = random_superblocks(quantization, 5, 3)
    blocks = read_nested_blocks(rows, quantization)
    assert blocks is not None
    group = 256 * 3 // blocks.s.shape[1]
    assert group == blocks.group
    scale = blocks.d.astype(np.float64).repeat(256 // group, axis=1) * blocks.s
    offset = blocks.m.astype(np.float64).repeat(256 // group, axis=1) * blocks.t
    weight = scale.repeat(group, axis=1) * blocks.q - offset.repeat(group, axis=1)
    expected = gguf.dequantize(rows, quantization)
    np.testing.assert_allclose(weight, expected, rtol=0, atol=2e-7 * np.abs(expected).max())
    assert blocks.q.max() < 1 << blocks.bits


def test_superblocks_of_different_kinds_are_stacked_without_rounding() -> None:
    kinds = (Type.Q4_K, Type.Q6_K, Type.Q5_K)
    rows = [random_superblocks(kind, 4, 2, seed) for seed, kind in enumerate(kinds)]
    parts = [read_nested_blocks(data, kind) for data, kind in zip(rows, kinds, strict=True)]
    stacked = concatenate_nested(parts)
    assert (stacked.bits, stacked.group) == (8, 16)
    linear = QuantizedLinear(stacked, None, torch.device("cpu"))
    expected = np.concatenate([gguf.dequantize(data, kind) for data, kind in zip(rows, kinds, strict=True)])
    torch.testing.assert_close(linear(torch.eye(512)).T, torch.from_numpy(expected), rtol=1e-6, atol=1e-4)


def test_factors_that_do_not_fit_are_left_to_the_library() -> None:
    rows = np.zeros((1, 210), dtype=np.uint8)
    rows[0, 208:] = np.frombuffer(np.float16(60000).tobytes(), dtype=np.uint8)
    assert read_nested_blocks(rows, Type.Q6_K) is None


@pytest.mark.parametrize("kinds", [(Type.Q4_K, Type.Q6_K), (Type.Q5_K, Type.Q8_0)])
def test_a_kquant_file_stays_packed_for_a_backend_that_wants_it(kinds) -> None:
    """Queries and keys in one kind, values in another, as such files have them."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1, "vocab_size": 32}
    model = AutoModelForCausalLM.from_config(make_config(**sizes))
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}

    class File:
        """Of blocks, but for norms and the embedding."""

        def __contains__(self, name: str) -> bool:
            return name in shapes

        def get(self, name: str) -> torch.Tensor:
            kind = self.kind(name)
            rows = torch.zeros(shapes[name]) if kind is None else gguf.dequantize(self.rows(name, kind), kind)
            return torch.as_tensor(rows)

        def kind(self, name: str) -> Type | None:
            if "norm" in name or "embed" in name:
                return None
            return kinds[1] if "v_proj" in name else kinds[0]

        def rows(self, name: str, kind: Type) -> np.ndarray:
            if kind is Type.Q8_0:
                return gguf.quantize(np.ones(shapes[name], dtype=np.float32), kind)
            return random_superblocks(kind, shapes[name][0], shapes[name][1] // 256)

        def blocks(self, name: str) -> WeightBlocks | None:
            kind = self.kind(name)
            return None if kind is None else read_blocks(self.rows(name, kind), kind)

        def nested_blocks(self, name: str) -> NestedBlocks | None:
            kind = self.kind(name)
            return None if kind is None else read_nested_blocks(self.rows(name, kind), kind)

        def is_quantized(self, name: str) -> bool:
            return self.kind(name) is not None

    config = parse_decoder_config(model.config.to_dict())
    decoder = Decoder(config, File(), torch.float32, torch.device("cpu"), lambda share, what: None, keeps_packed=True)
    prefix = "model.layers.0.self_attn"
    alone = [f"{prefix}.{name}_proj.weight" for name in "qkv"] if Type.Q8_0 in kinds else []
    assert decoder.dequantized == alone
    assert decoder.has_quantized_weights


def test_ends_of_sequence_are_those_of_the_tokenizer(model, tmp_path) -> None:
    write_gguf(tmp_path / "model.gguf", model)
    assert GGUFCheckpoint(tmp_path / "model.gguf").config.eos_token_ids == (5, 7)


def test_rope_scaling_is_read(model, tmp_path) -> None:
    def scale(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32)

    write_gguf(tmp_path / "model.gguf", model, change=scale)
    rope = GGUFCheckpoint(tmp_path / "model.gguf").config.rope
    assert (rope.kind, rope.factor, rope.original_max_position) == ("yarn", 4.0, 32)


def test_llama3_scaling_comes_as_a_tensor_of_divisors(tiny, load, check_logits, tmp_path) -> None:
    from pagedd.engine.model.config import RopeConfig
    from pagedd.engine.model.rope import inverse_frequencies

    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    _, model = tiny(make_config(rope_parameters={"rope_type": "llama3", "rope_theta": 10_000.0, **llama3}))
    scaled = RopeConfig(kind="llama3", factor=8.0, original_max_position=64)
    divisors = inverse_frequencies(RopeConfig(), 32)[0] / inverse_frequencies(scaled, 32)[0]
    assert divisors.max() == 8.0

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", divisors.numpy())

    write_gguf(tmp_path / "model.gguf", model, change=add)
    check_logits(load(tmp_path / "model.gguf"), model, [prompt()], [{0: 21}])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda writer: writer.add_sliding_window(8), "llama.attention.sliding_window = 8"),
        (lambda writer: writer.add_logit_scale(2.0), "llama.logit_scale = 2.0"),
        (lambda writer: writer.add_expert_count(4), "llama.expert_count = 4"),
        (lambda writer: writer.add_rope_dimension_count(16), "rope.dimension_count = 16 with heads of 32"),
        (lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "rope type 'longrope'"),
        (lambda writer: writer.add_tensor("blk.0.ffn_gate_inp.weight", np.zeros(4, np.float32)), "ffn_gate_inp"),
        (lambda writer: writer.add_tensor("blk.0.attn_qkv.weight", np.zeros(4, np.float32)), "attn_qkv"),
    ],
)
def test_what_is_not_exact_is_refused_by_name(model, tmp_path, change, named) -> None:
    write_gguf(tmp_path / "model.gguf", model, change=change)
    with pytest.raises(EngineError) as refusal:
        GGUFCheckpoint(tmp_path / "model.gguf")
    assert refusal.value.code == "unsupported_model"
    assert named in refusal.value.message


def test_a_count_of_zero_changes_nothing(model, tmp_path) -> None:
    write_gguf(tmp_path / "model.gguf", model, change=lambda writer: writer.add_expert_count(0))
    GGUFCheckpoint(tmp_path / "model.gguf")


def test_another_architecture_is_refused_by_name(tmp_path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(EngineError, match="unsupported_model: GGUF architecture 'mamba'"):
        GGUFCheckpoint(tmp_path / "model.gguf")


def test_a_tensor_type_that_the_library_cannot_dequantize_is_refused_by_name(model, tmp_path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.2.ffn_up.weight", np.zeros((1, 32), np.int8))

    write_gguf(tmp_path / "model.gguf", model, change=add)
    checkpoint = GGUFCheckpoint(tmp_path / "model.gguf")
    with pytest.raises(EngineError, match=r"unsupported_model: GGUF tensor type I8 of blk\.2\.ffn_up\.weight"):
        checkpoint.get("model.layers.2.mlp.up_proj.weight")


def test_a_missing_tensor_is_named(tiny, load, tmp_path) -> None:
    _, model = tiny(make_config(num_hidden_layers=1))
    model.config.num_hidden_layers = 2
    write_gguf(tmp_path / "model.gguf", model)
    with pytest.raises(EngineError, match=r"model_unavailable: tensor model\.layers\.1\..* is missing"):
        load(tmp_path / "model.gguf")


def test_a_tensor_of_another_shape_is_named(tiny, load, tmp_path) -> None:
    _, model = tiny(make_config())
    model.config.intermediate_size = 32
    write_gguf(tmp_path / "model.gguf", model)
    with pytest.raises(EngineError, match=r"model_unavailable: tensor .*gate_proj\.weight is \[96, 64\], \[32, 64\]"):
        load(tmp_path / "model.gguf")
