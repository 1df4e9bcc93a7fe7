"""Folders of weights: one file, shards, and what is not there."""

import json

import pytest
import torch
from safetensors.torch import save_file

from pagedd.engine.errors import EngineError
from pagedd.engine.model.safetensors import SafetensorsCheckpoint, read_json


def refuse(folder) -> EngineError:
    with pytest.raises(EngineError) as refusal:
        SafetensorsCheckpoint(folder)
    assert refusal.value.code == "model_unavailable"
    return refusal.value


def test_a_single_file_is_read_as_stored(tmp_path) -> None:
    save_file({"a": torch.arange(3, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert "a" in checkpoint
    assert "b" not in checkpoint
    assert torch.equal(checkpoint.get("a"), torch.arange(3, dtype=torch.bfloat16))


def test_shards_are_found_through_the_index(tmp_path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.ones(1)}, tmp_path / "model-2.safetensors")
    save_file({"stray": torch.ones(1)}, tmp_path / "other.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert checkpoint.get("b").item() == 1
    assert "stray" not in checkpoint


@pytest.mark.parametrize("shard", ["model-9.safetensors", "../model.safetensors", "a" * 300, "a\0", ""])
def test_a_shard_that_is_missing_or_elsewhere_is_named(tmp_path, shard) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    assert f"shard {shard[:256]} of" in refuse(folder).message


@pytest.mark.parametrize("weight_map", [{"a": 1}, {"a": ["model.safetensors"]}, {"a": None, "b": "x"}, []], ids=repr)
def test_an_index_that_names_no_files_is_refused(tmp_path, weight_map) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert "has no weight_map" in refuse(tmp_path).message


def test_a_json_file_of_any_depth_is_refused(tmp_path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("[" * 100_000)
    assert "is not JSON" in refuse(tmp_path).message


def test_a_folder_with_pickled_weights_only_is_refused(tmp_path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    assert "only pickled weights (pytorch_model.bin)" in refuse(tmp_path).message


def test_a_folder_without_weights_is_refused(tmp_path) -> None:
    assert "no weights" in refuse(tmp_path).message


def test_a_damaged_file_is_refused_by_name(tmp_path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    assert "model.safetensors is not a readable safetensors file" in refuse(tmp_path).message


@pytest.mark.parametrize(("content", "told"), [("{", "is not JSON"), ("[]", "is not a JSON object")])
def test_json_that_is_not_an_object_is_refused_by_name(tmp_path, content, told) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(EngineError, match=rf"model_unavailable: .*config\.json {told}"):
        read_json(tmp_path / "config.json")


def test_an_absent_file_is_named(tmp_path) -> None:
    with pytest.raises(EngineError, match=r"model_unavailable: .*config\.json: No such file"):
        read_json(tmp_path / "config.json")
