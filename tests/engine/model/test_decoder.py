"""The fused decoder's logits against transformers', on tiny models of odd shapes and on the real one."""

import pytest
import torch

from pagedd.bench.reference_model import load_reference
from pagedd.engine.model.decoder import Decoder
from pagedd.engine.model.gguf import GGUFCheckpoint
from pagedd.engine.model.load import LoadedModel
from pagedd.kernels import ops, reference

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
}


def make_config(kind: str, **changes):
    from transformers import AutoConfig

    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}
    return AutoConfig.for_model(kind, **(SHAPE | heads | changes))


def random_prompts(*lengths: int, vocab_size: int = SHAPE["vocab_size"]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]


# Two prompts of 29 and 13: whole, in chunks, decodes beside chunks, chunks that begin and end inside blocks.
WHOLE = [{0: 29, 1: 13}]
ALONE = [{0: 29}, {1: 13}]
MIXED = [{0: 11}, {1: 12, 0: 9}, {0: 8, 1: 1}, {0: 1}]


@pytest.mark.parametrize("steps", [WHOLE, ALONE, MIXED], ids=["together", "alone", "chunks and decodes"])
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("llama", {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 64}),
        ("llama", {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 80}),
        ("llama", {"num_attention_heads": 4, "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen2", {"hidden_size": 48}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
        ("qwen3", {"num_attention_heads": 8, "head_dim": 80}),
        ("mistral", {"sliding_window": 8}),
        ("mistral", {"sliding_window": None, "num_attention_heads": 2, "head_dim": 64}),
    ],
    ids=str,
)
def test_logits_equal_transformers(tiny, load, check_logits, kind, changes, steps) -> None:
    folder, model = tiny(make_config(kind, **changes))
    check_logits(load(folder), model, random_prompts(29, 13), steps)


def test_the_reference_backend_serves_the_same_logits(tiny, load, check_logits, monkeypatch) -> None:
    monkeypatch.setattr(ops, "_active", reference)
    folder, model = tiny(make_config("qwen3"))
    check_logits(load(folder), model, random_prompts(29, 13), MIXED)


@pytest.mark.parametrize("block_size", [1, 8, 16, 32])
def test_the_block_size_does_not_show(tiny, load, check_logits, block_size) -> None:
    folder, model = tiny(make_config("llama"))
    check_logits(load(folder), model, random_prompts(29, 13), MIXED, block_size=block_size)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 2048,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
    ],
    ids=lambda scaling: scaling["rope_type"],
)
def test_logits_at_position_9000_under_rope_scaling_equal_transformers(tiny, load, check_logits, scaling) -> None:
    config = make_config(
        "llama",
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=16_384,
        rope_parameters=scaling | {"rope_theta": 10_000.0},
    )
    folder, model = tiny(config)
    model.set_attn_implementation("sdpa")
    (prompt,) = random_prompts(9001)
    check_logits(load(folder), model, [prompt], [{0: 4096}, {0: 4904}, {0: 1}], block_size=32)


def test_bfloat16_stays_close(tiny, load, paged_logits) -> None:
    folder, model = tiny(make_config("llama"))
    (prompt,) = random_prompts(29)
    (rows,) = paged_logits(load(folder, dtype="bfloat16"), [prompt], [{0: 20}, {0: 9}])
    expected = model(input_ids=torch.tensor([prompt])).logits[0]
    assert rows[28].dtype == torch.float32
    assert (rows[28] - expected[28]).abs().max() < 0.05 * expected.abs().max()


def test_the_real_models_logits_equal_transformers_whole_and_in_mixed_chunks(model_gguf, load, check_logits) -> None:
    model = load_reference(model_gguf, torch.float32)
    loaded = load(model_gguf)
    prompts = random_prompts(90, 37, vocab_size=49_152)
    check_logits(loaded, model, prompts, [{0: 90, 1: 37}], block_size=16)
    check_logits(loaded, model, prompts, [{0: 50}, {1: 36, 0: 23}, {0: 16, 1: 1}, {0: 1}], block_size=16)


def test_weights_that_stay_as_the_file_quantizes_them_give_the_same_logits(model_gguf, paged_logits) -> None:
    file, cpu = GGUFCheckpoint(model_gguf), torch.device("cpu")

    def logits(keeps_packed: bool) -> torch.Tensor:
        decoder = Decoder(file.config, file, torch.float32, cpu, lambda *said: None, keeps_packed=keeps_packed)
        assert decoder.has_quantized_weights == keeps_packed
        loaded = LoadedModel(decoder, ops.BackendChoice("torch", ""), file.config, cpu, torch.float32)
        return paged_logits(loaded, [[504, 3575, 282, 4649, 314]], [{0: 5}])[0][4]

    torch.testing.assert_close(logits(True), logits(False), rtol=1e-3, atol=1e-3)
