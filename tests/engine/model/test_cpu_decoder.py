"""The decoder as one C++ call: logits against transformers, forms of weights, and where it cannot serve."""

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pagedd.engine.config import EngineConfig
from pagedd.engine.errors import EngineError
from pagedd.engine.model import cpu_decoder
from pagedd.engine.model.cpu_decoder import CpuDecoder
from pagedd.engine.model.decoder import Decoder
from pagedd.engine.model.load import load_model
from pagedd.kernels import cpu
from pagedd.kernels.kv_form import FORMS

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
}
WHOLE = [{0: 29, 1: 13}]
ALONE = [{0: 29}, {1: 13}]
MIXED = [{0: 11}, {1: 12, 0: 9}, {0: 8, 1: 1}, {0: 1}]


@pytest.fixture(autouse=True)
def extension(cpu_extension):
    return cpu_extension


def make_config(kind: str, num_heads: int, num_kv_heads: int, head_dim: int, **changes):
    from transformers import AutoConfig

    heads = {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "head_dim": head_dim}
    return AutoConfig.for_model(kind, **(SHAPE | heads | changes))


def random_prompts(*lengths: int, vocab_size: int = 97) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("steps", [WHOLE, ALONE, MIXED], ids=["together", "alone", "chunks and decodes"])
@pytest.mark.parametrize(
    ("kind", "heads", "changes"),
    [
        ("llama", (3, 3, 64), {"hidden_size": 192}),
        ("llama", (6, 2, 80), {"hidden_size": 96}),
        ("llama", (8, 1, 128), {"tie_word_embeddings": True}),
        ("llama", (4, 1, 64), {"attention_bias": True, "mlp_bias": True}),
        ("qwen2", (4, 2, 64), {}),
        ("qwen2", (4, 2, 64), {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
        ("qwen3", (8, 2, 80), {}),
        ("mistral", (2, 2, 16), {"sliding_window": 8}),
        ("mistral", (4, 1, 96), {"sliding_window": None}),
    ],
    ids=str,
)
def test_float32_logits_equal_transformers(tiny, load, check_logits, kind, heads, changes, steps) -> None:
    folder, model = tiny(make_config(kind, *heads, **changes))
    loaded = load(folder)
    assert isinstance(loaded.model, CpuDecoder)
    check_logits(loaded, model, random_prompts(29, 13), steps)


@pytest.mark.parametrize("block_size", [1, 8, 16, 32])
def test_the_block_size_does_not_show(tiny, load, check_logits, block_size) -> None:
    folder, model = tiny(make_config("llama", 4, 2, 64))
    check_logits(load(folder), model, random_prompts(29, 13), MIXED, block_size=block_size)


@pytest.mark.parametrize(("form", "tolerance"), [("bf16", 0.05), ("int8", 0.1), ("int4", 0.5)])
def test_narrower_forms_stay_close_and_every_row_count_sees_the_same_weights(
    tiny, load, paged_logits, form, tolerance
) -> None:
    folder, model = tiny(make_config("llama", 4, 2, 64))
    prompts = random_prompts(29, 13)
    loaded = load(folder, dtype="bfloat16", weight_dtype=form)
    assert set(loaded.model.forms) == {form}
    whole, mixed = (paged_logits(loaded, prompts, steps) for steps in (WHOLE, MIXED))
    for index, prompt in enumerate(prompts):
        last = len(prompt) - 1
        expected = model(input_ids=torch.tensor([prompt])).logits[0, last]
        scale = expected.abs().max()
        assert (whole[index][last] - expected).abs().max() < tolerance * scale
        assert (whole[index][last] - mixed[index][last]).abs().max() < 0.03 * scale


@pytest.mark.parametrize("heads", [(8, 1, 128), (4, 4, 16)], ids=str)
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_scratch_stays_within_what_is_reserved_for_it(tiny, load, paged_logits, heads, num_threads) -> None:
    folder, _ = tiny(make_config("llama", *heads))
    loaded = load(folder)
    threads = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        paged_logits(loaded, random_prompts(120, 1), [{0: 120, 1: 1}])
        logits = 121 * loaded.config.vocab_size * 4
        reserved = loaded.model.activation_bytes(121, 121, 128, FORMS["float32"]) - logits
        assert 0 < loaded.model.scratch_bytes <= reserved
    finally:
        torch.set_num_threads(threads)


def test_layers_may_hold_their_weights_in_different_forms(tiny, load, paged_logits, monkeypatch) -> None:
    pack = cpu_decoder._Packer._pack

    def pack_narrow_first(packer, parts, *rest):
        packer._form = "int8" if any("layers.0." in name for name in parts) else "float32"
        return pack(packer, parts, *rest)

    monkeypatch.setattr(cpu_decoder._Packer, "_pack", pack_narrow_first)
    folder, model = tiny(make_config("llama", 4, 2, 64))
    loaded = load(folder)
    assert set(loaded.model.forms) == {"int8", "float32"}
    prompts = random_prompts(29, 13)
    for logits in (paged_logits(loaded, prompts, steps) for steps in (WHOLE, MIXED)):
        for index, prompt in enumerate(prompts):
            expected = model(input_ids=torch.tensor([prompt])).logits[0, -1]
            assert (logits[index][len(prompt) - 1] - expected).abs().max() < 0.1 * expected.abs().max()


@pytest.mark.parametrize(("form", "tolerance"), [("int8", 0.02), ("fp8", 0.25), ("k8v4", 0.6), ("int4", 0.6)])
def test_a_quantized_cache_stays_close_and_torch_operations_read_it_alike(
    tiny, load, paged_logits, monkeypatch, form, tolerance
) -> None:
    folder, _ = tiny(make_config("llama", 4, 2, 80))
    prompts = random_prompts(29, 13)
    loaded = load(folder)
    exact = paged_logits(loaded, prompts, MIXED, block_size=16)
    quantized = paged_logits(loaded, prompts, MIXED, block_size=16, kv_form=form)
    monkeypatch.setenv("PAGEDD_KERNELS", "torch")
    over_torch = load(folder)
    assert isinstance(over_torch.model, Decoder)
    alike = paged_logits(over_torch, prompts, MIXED, block_size=16, kv_form=form)
    for index, rows in enumerate(exact):
        for position, logits in rows.items():
            scale = logits.abs().max()
            difference = (quantized[index][position] - logits).abs().max()
            assert 0 < difference < tolerance * scale
            assert (quantized[index][position] - alike[index][position]).abs().max() < 0.05 * scale


def test_pages_of_another_type_than_the_kernels_read_are_refused(tiny, load, paged_logits, monkeypatch) -> None:
    folder, _ = tiny(make_config("llama", 4, 2, 80))
    loaded = load(folder)
    forward = loaded.model.forward

    def with_wider_pages(batch, kv):
        kv.open_keys = kv.open_keys.float()
        return forward(batch, kv)

    monkeypatch.setattr(loaded.model, "forward", with_wider_pages)
    with pytest.raises(RuntimeError, match="open_keys: a contiguous CPU tensor of BFloat16 is expected"):
        paged_logits(loaded, random_prompts(29, 13), MIXED, block_size=16, kv_form="int4")


def test_auto_keeps_a_gguf_files_own_numbers(model_gguf) -> None:
    loaded = load_model(EngineConfig(model=str(model_gguf), device="cpu"), lambda share, what: None)
    assert set(loaded.model.forms) == {"int4", "int8"}
    assert loaded.model.weight_bytes < 110e6


def test_the_file_is_let_go_once_the_weights_are_packed(model_gguf) -> None:
    loaded = load_model(EngineConfig(model=str(model_gguf)), lambda share, what: None)
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(model_gguf))]
    assert loaded.model.own_kernels == "cpp"
    assert not mapped


def test_without_a_compiler_the_slower_path_serves_and_the_log_says_why(tiny, load, monkeypatch, caplog) -> None:
    def fail():
        raise cpu.KernelsUnavailableError("no C++ compiler (g++ is not on the PATH); install g++")

    monkeypatch.setattr(cpu, "load", fail)
    folder, _ = tiny(make_config("llama", 4, 2, 64))
    with caplog.at_level(logging.WARNING):
        assert isinstance(load(folder).model, Decoder)
    assert "install g++" in caplog.text
    with pytest.raises(EngineError, match="invalid_setting: weight_dtype int4 needs the C"):
        load(folder, weight_dtype="int4")


def test_sizes_that_do_not_fit_the_tiles_are_served_by_torch(tiny, load, check_logits, caplog) -> None:
    folder, model = tiny(make_config("llama", 4, 2, 8))
    with caplog.at_level(logging.WARNING):
        loaded = load(folder)
    assert isinstance(loaded.model, Decoder)
    assert "head_dim 8 is not a multiple of 16" in caplog.text
    check_logits(loaded, model, random_prompts(29, 13), WHOLE)


def test_no_compiler_on_the_path_is_said_by_name(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CACHE_DIRECTORY", raising=False)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(cpu.KernelsUnavailableError, match="no C\\+\\+ compiler \\(no-such-compiler"):
        cpu.load.__wrapped__()


def test_a_processor_for_which_torch_is_faster_is_served_by_torch(tiny, load, monkeypatch, caplog) -> None:
    monkeypatch.setattr(cpu, "load", lambda: SimpleNamespace(INSTRUCTIONS=None))
    folder, _ = tiny(make_config("llama", 4, 2, 64))
    with caplog.at_level(logging.WARNING):
        assert isinstance(load(folder).model, Decoder)
    assert "the C++ kernels' products are slow on a processor without AVX2" in caplog.text
