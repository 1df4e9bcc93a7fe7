"""The way from a path to a model."""

import json
from types import SimpleNamespace

import pytest
import torch

from pagedd.engine.config import EngineConfig
from pagedd.engine.errors import EngineError
from pagedd.engine.model import load as load_module
from pagedd.engine.model.decoder import Decoder
from pagedd.engine.model.load import load_model
from pagedd.engine.model.safetensors import SafetensorsCheckpoint

CPU = torch.device("cpu")


def tiny_config(kind: str = "llama"):
    from transformers import AutoConfig

    return AutoConfig.for_model(
        kind,
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        eos_token_id=3,
    )


def test_a_folder_of_the_llama_family_gets_the_fused_decoder(tiny, load) -> None:
    folder, model = tiny(tiny_config())
    loaded = load(folder)
    assert isinstance(loaded.model, Decoder)
    assert (loaded.device, loaded.dtype) == (CPU, torch.float32)
    matrices = sum(weight.nbytes for weight in model.parameters() if weight.ndim == 2)
    assert loaded.model.weight_bytes == matrices


def test_ends_of_sequence_are_the_union_of_both_configs(tiny, load) -> None:
    folder, _ = tiny(tiny_config())
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 3]}))
    assert load(folder).config.eos_token_ids == (3, 9)


def test_progress_rises_to_one_and_names_the_layers(tiny) -> None:
    folder, _ = tiny(tiny_config())
    told: list[tuple[float, str]] = []
    load_model(EngineConfig(model=str(folder), device="cpu"), lambda share, what: told.append((share, what)))
    shares = [share for share, _ in told]
    assert shares == sorted(shares)
    assert shares[0] == 0.0
    assert told[-1] == (1.0, "layer 2 of 2")


def test_a_path_that_is_not_there_is_refused(tmp_path) -> None:
    with pytest.raises(EngineError, match=r"model_unavailable: .*absent does not exist"):
        load_model(EngineConfig(model=str(tmp_path / "absent")), lambda share, what: None)


def test_a_file_that_is_not_a_gguf_is_refused(tmp_path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"hello, world, this is text")
    with pytest.raises(EngineError, match=r"model_unavailable: .*does not begin with GGUF"):
        load_model(EngineConfig(model=str(tmp_path / "model.gguf")), lambda share, what: None)


def test_weights_that_a_card_could_never_hold_are_refused_before_one_is_read(tiny, monkeypatch) -> None:
    folder, model = tiny(tiny_config())
    num_bytes = 2 * sum(weight.numel() for weight in model.parameters())
    card = SimpleNamespace(total_memory=num_bytes - 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    settings, opened = EngineConfig(model=str(folder)), (tiny_config(), SafetensorsCheckpoint(folder))
    monkeypatch.setattr(SafetensorsCheckpoint, "get", lambda checkpoint, name: pytest.fail("a weight is read"))
    with pytest.raises(EngineError, match=r"unsupported_device: .* take .* GiB at least, cuda:0 has .*; choose"):
        load_module._refuse_what_is_too_large(settings, opened, torch.device("cuda", 0), torch.bfloat16)
    card.total_memory = num_bytes
    load_module._refuse_what_is_too_large(settings, opened, torch.device("cuda", 0), torch.bfloat16)
