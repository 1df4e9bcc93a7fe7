"""Folders with config.json and safetensors files: which file holds which tensor.

Owns the reading of tensors; what config.json says is `config.py`'s. A folder with pickled weights only is refused:
unpickling runs code.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from pagedd.engine.errors import EngineError
from pagedd.engine.model.json_fields import malformed

_INDEX = "model.safetensors.index.json"


class SafetensorsCheckpoint:
    """The tensors of one folder, one file or many shards, mapped into memory."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Any] = {}  # tensor name → open file
        for path in _weight_files(folder):
            try:
                file = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise malformed(f"{path} is not a readable safetensors file ({error})") from error
            names: list[str] = file.keys()  # type: ignore[no-untyped-call]
            self._files |= dict.fromkeys(names, file)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def get(self, name: str) -> torch.Tensor:
        """The tensor as it is stored."""
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor

    def least_bytes(self, itemsize: int) -> int:
        """What the tensors take at least, of so many bytes a number, told from the headers."""
        slices = (file.get_slice(name) for name, file in self._files.items())
        num_numbers: int = sum(math.prod(part.get_shape()) for part in slices)
        return num_numbers * itemsize


def read_json(path: Path) -> dict[str, Any]:
    """An object from a JSON file of a model's folder, or an EngineError that names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise EngineError("model_unavailable", f"{path}: {error.strerror or error}; fetch the model first") from error
    except (ValueError, RecursionError) as error:
        raise malformed(f"{path} is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise malformed(f"{path} is not a JSON object")
    return value


def _weight_files(folder: Path) -> list[Path]:
    if (folder / _INDEX).exists():
        shards = read_json(folder / _INDEX).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise malformed(f"{folder / _INDEX} has no weight_map")
        names = sorted(set(shards.values()))
        # Looked for among what is there: a name may lead elsewhere, or be none that a file can have.
        present = {path.name for path in folder.iterdir() if path.is_file()}
        for name in names:
            if name not in present:
                raise malformed(f"shard {name[:256]} of {folder / _INDEX} is missing")
        return [folder / name for name in names]
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        pickled = next(folder.glob("*.bin"), None)
        found = f"only pickled weights ({pickled.name})" if pickled else "no weights"
        raise EngineError("model_unavailable", f"{folder}: {found}; provide safetensors files or a GGUF file")
    return paths
