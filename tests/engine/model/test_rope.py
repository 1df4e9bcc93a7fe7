"""Frequencies and rotations against transformers', at far positions too."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pagedd.engine.model.config import RopeConfig, parse_decoder_config
from pagedd.engine.model.rope import RotaryEmbedding, inverse_frequencies

SHAPE = {
    "vocab_size": 100,
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 16_384,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 2048}
YARN = {"factor": 4.0, "original_max_position_embeddings": 4096}
SCALINGS = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "llama3", **LLAMA3},
    {"rope_type": "yarn", **YARN},
    {"rope_type": "yarn", **YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    {"rope_type": "yarn", **YARN, "attention_factor": 1.25},
    {"rope_type": "yarn", **YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
    {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 10},
]


@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_cosines_and_sines_equal_transformers_to_the_last_bit(scaling, theta, head_dim) -> None:
    config = LlamaConfig(**SHAPE, head_dim=head_dim, rope_parameters=scaling | {"rope_theta": theta})
    theirs = LlamaRotaryEmbedding(config)
    raw = {"model_type": "llama", **SHAPE, "head_dim": head_dim, "rope_theta": theta, "rope_scaling": scaling}
    ours = RotaryEmbedding(parse_decoder_config(raw).rope, head_dim, torch.device("cpu"))
    positions = torch.tensor([0, 1, 17, 2047, 2048, 9000, 16_383])
    cos, sin = theirs(torch.zeros(1), positions[None])
    our_cos, our_sin = ours(positions)
    assert torch.equal(our_cos, cos[0, :, : head_dim // 2])
    assert torch.equal(our_sin, sin[0, :, : head_dim // 2])


def test_divisors_from_a_gguf_stretch_each_frequency() -> None:
    plain, _ = inverse_frequencies(RopeConfig(), 4)
    stretched, factor = inverse_frequencies(RopeConfig(frequency_divisors=(1.0, 8.0)), 4)
    assert factor == 1.0
    assert torch.equal(stretched, plain / torch.tensor([1.0, 8.0]))
