"""Models of some kilobytes that the real engine runs: random weights, a token a byte, no text worth reading."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from .byte_model import EOS, VOCAB_SIZE, write_model

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, LAYERS = 64, 2, 1, 32, 64, 2


def write_tiny_model(folder: Path, *, seed: int = 0, without: str = "", **changes: object) -> Path:
    """A Llama; `without` leaves that tensor out, which shows when the weights are loaded and not before."""
    write_model(folder)
    (folder / "model.json").unlink()  # what pagedd makes itself of the rest
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": EOS,
        "dtype": "float32",
    } | changes
    (folder / "config.json").write_text(json.dumps(config))
    draw = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB_SIZE, HIDDEN),
        "lm_head.weight": (VOCAB_SIZE, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        for name, shape in {
            "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            "mlp.gate_proj": (MLP, HIDDEN),
            "mlp.up_proj": (MLP, HIDDEN),
            "mlp.down_proj": (HIDDEN, MLP),
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
        }.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    tensors = {name: (0.1 * draw.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}
    tensors.pop(without, None)
    save_file(tensors, folder / "model.safetensors")
    return folder
