"""Other decoder models of transformers: exact over paged KV, or refused by name."""

import pytest
import torch

from pagedd.engine.errors import EngineError
from pagedd.engine.model import hf_adapter
from pagedd.engine.model.hf_adapter import AdaptedModel
from pagedd.kernels import ops
from pagedd.kernels.kv_form import FORMS
from pagedd.kernels.layout import MAX_GATHERED_SLOTS

SHAPE = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
GROUPED = SHAPE | {"num_key_value_heads": 2, "head_dim": 8}
GPT2 = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
OPT = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "ffn_dim": 48,
    "max_position_embeddings": 64,
    "word_embed_proj_dim": 16,
}
CAPPED = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 16}

# Two prompts of 30 and 11, whole and in steps that mix chunks and decodes.
STEPS = [{0: 13}, {1: 10, 0: 8}, {0: 8, 1: 1}, {0: 1}]


def make_config(kind: str, **settings):
    from transformers import AutoConfig

    return AutoConfig.for_model(kind, **settings)


def random_prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(99, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("gpt2", GPT2),
        ("opt", OPT),
        ("gemma2", GROUPED | CAPPED | {"sliding_window": 8}),
        ("starcoder2", SHAPE | {"num_key_value_heads": 2, "sliding_window": 8}),
        ("phi", SHAPE | {"num_key_value_heads": 4}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_logits_equal_the_models_own(tiny, load, check_logits, kind, settings) -> None:
    folder, model = tiny(make_config(kind, **settings))
    loaded = load(folder)
    assert isinstance(loaded.model, AdaptedModel)
    assert loaded.config.architecture == kind
    assert (loaded.config.num_layers, loaded.config.head_dim) == (2, 8)
    check_logits(loaded, model, random_prompts(30, 11), [{0: 30, 1: 11}])
    check_logits(loaded, model, random_prompts(30, 11), STEPS)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("gpt2", GPT2), ("gemma2", GROUPED | CAPPED | {"sliding_window": 8, "head_dim": 16})],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_logits_over_triton_equal_the_models_own(tiny, load, check_logits, monkeypatch, kind, settings) -> None:
    monkeypatch.setenv(ops.BACKEND_VARIABLE, "triton")
    folder, model = tiny(make_config(kind, **settings))
    check_logits(load(folder), model, random_prompts(30, 11), STEPS)
    monkeypatch.undo()
    ops.select_backend(torch.device("cpu"))


def test_bfloat16_passes_the_probe(tiny, load) -> None:
    folder, _ = tiny(make_config("gpt2", **GPT2))
    assert load(folder, dtype="bfloat16").dtype == torch.bfloat16


def refuse(load, folder) -> str:
    with pytest.raises(EngineError) as refusal:
        load(folder)
    assert refusal.value.code == "unsupported_model"
    return refusal.value.message


@pytest.mark.parametrize(
    ("kind", "settings", "named"),
    [
        ("bloom", {"vocab_size": 99, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "bloom"),
        ("mpt", {"vocab_size": 99, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}, "mpt"),
        ("mamba", {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2}, "mamba"),
        (
            "gpt_neo",
            {
                "vocab_size": 99,
                "hidden_size": 32,
                "num_layers": 2,
                "num_heads": 4,
                "attention_types": [[["global", "local"], 1]],
                "max_position_embeddings": 64,
            },
            "0 of its 2 layers use transformers' attention interface",
        ),
        (
            "gpt_oss",
            GROUPED | {"num_local_experts": 4},
            "s_aux",
        ),
        (
            "deepseek_v3",
            SHAPE
            | {
                "num_key_value_heads": 4,
                "first_k_dense_replace": 1,
                "n_routed_experts": 4,
                "n_group": 1,
                "topk_group": 1,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 16,
                "kv_lora_rank": 8,
                "q_lora_rank": 8,
                "qk_rope_head_dim": 8,
                "qk_nope_head_dim": 8,
                "v_head_dim": 8,
            },
            "keys of 16 and values of 8",
        ),
        (
            "starcoder2",
            SHAPE | {"num_key_value_heads": 4, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "rope type 'dynamic'",
        ),
        ("qwen3_next", GROUPED | {"num_experts": 4, "num_experts_per_tok": 2}, "layers of linear_attention"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_exact_is_refused_by_name(tiny, load, kind, settings, named) -> None:
    folder, _ = tiny(make_config(kind, **settings))
    assert named in refuse(load, folder)


def test_an_encoder_decoder_is_refused(tmp_path, load) -> None:
    make_config("t5", vocab_size=99, d_model=32, num_layers=2, num_heads=4, d_kv=8, d_ff=32).save_pretrained(tmp_path)
    assert "t5, an encoder-decoder" in refuse(load, tmp_path)


def test_code_from_the_models_own_folder_is_never_run(tmp_path, load) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}')
    (tmp_path / "mine.py").write_text("raise SystemExit('ran')")
    assert "its architecture" in refuse(load, tmp_path)


def test_a_long_window_that_the_model_keeps_to_itself_is_refused(tiny, load, monkeypatch) -> None:
    # The probe's prompt is shorter than this window, so only the comparison of arguments can notice.
    folder, _ = tiny(make_config("starcoder2", **SHAPE, num_key_value_heads=2, sliding_window=100_000))
    note = hf_adapter._note

    def forget_the_window(one_pass, module, query, key, value, attention_mask, sliding_window, arguments):
        note(one_pass, module, query, key, value, attention_mask, None, arguments)

    monkeypatch.setattr(hf_adapter, "_note", forget_the_window)
    assert "layer 0 has window 100000 and asks for None" in refuse(load, folder)


@pytest.mark.parametrize("fault", ["window", "scale", "positions"])
def test_the_probe_notices_what_is_not_the_same(tiny, load, monkeypatch, fault) -> None:
    folder, _ = tiny(make_config("starcoder2", **SHAPE, num_key_value_heads=2, sliding_window=8))
    attend = hf_adapter.ops.paged_attention

    def wrong(query, kv_layer, batch, *, scale, sliding_window, soft_cap):
        if fault == "window":
            sliding_window += 1
        elif fault == "scale":
            scale *= 1.1
        else:
            query = query.roll(1, dims=-1)
        return attend(query, kv_layer, batch, scale=scale, sliding_window=sliding_window, soft_cap=soft_cap)

    monkeypatch.setattr(hf_adapter.ops, "paged_attention", wrong)
    assert "paged logits differ by" in refuse(load, folder)


def test_room_for_gathered_keys_is_that_of_the_kv_heads_and_none_where_nothing_is_gathered(tiny, load) -> None:
    folder, _ = tiny(make_config("gemma2", **GROUPED | CAPPED | {"sliding_window": 8}))
    model = load(folder).model
    sizes = {"num_tokens": 1, "num_rows": 1, "kv_form": FORMS["float32"]}
    longer = model.activation_bytes(max_context_len=MAX_GATHERED_SLOTS + 10, **sizes)
    assert longer - model.activation_bytes(max_context_len=64, **sizes) == 10 * (2 * 8) * FORMS[
        "float32"
    ].gathered_bytes(4)
    one_kernel = AdaptedModel(model._model, gathers_kv=False)
    one_kernel.discover(torch.tensor([1, 2, 3]))
    reserved = one_kernel.activation_bytes(max_context_len=MAX_GATHERED_SLOTS + 10, **sizes)
    assert reserved == one_kernel.activation_bytes(max_context_len=64, **sizes) < 1 << 20
