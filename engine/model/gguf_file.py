"""The container: a GGUF file's header, scalar metadata and table of tensors, and each tensor's bytes. No torch.

Owns the walk over the bytes and trusts none of it: every count is held against what is left of the file. What the keys
and tensors mean is `gguf.py`'s. The `gguf` package has a reader too, which takes seconds for a vocabulary, and for ever
for a file that claims 2⁶⁰ elements; its table of quantization types is used here.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from pagedd.engine.errors import EngineError
from pagedd.engine.model.config import malformed, unsupported

_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# value type -> struct code
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_DIMENSIONS = 4
_MAX_ARRAY_DEPTH = 4


@dataclass(frozen=True, slots=True)
class Array:
    """Stands for an array of the metadata: the engine needs nothing that is in one, and a vocabulary is large."""

    length: int


Value = int | float | bool | str | Array


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies.

    Attributes:
        shape: outermost dimension first, as numpy has it; the file has it the other way round.
        offset: of its first byte, from the start of the file.
        num_bytes: whole rows of whole quantization blocks.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    num_bytes: int


class GGUFFile:
    """One file, mapped into memory.

    Attributes:
        metadata: every key, arrays as `Array`.
        tensors: every tensor by its name in the file.
    """

    def __init__(self, path: Path) -> None:
        """Raises EngineError: `model_unavailable` when the file is not there or not well formed."""
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            message = f"{path}: {error.strerror or error}; fetch the model first"
            raise EngineError("model_unavailable", message) from error
        except ValueError as error:
            raise malformed(f"{path} is empty") from error
        try:
            self.metadata, self.tensors = _Walk(self._data).read()
        except (_Malformed, UnicodeDecodeError) as error:
            raise malformed(f"{path} is not a well-formed GGUF file: {error}") from error

    def read(self, entry: TensorEntry) -> NDArray[np.uint8]:
        """The tensor's bytes, [*outer dimensions, bytes per row], read-only."""
        data = np.frombuffer(self._data, dtype=np.uint8, count=entry.num_bytes, offset=entry.offset)
        return data.reshape(*entry.shape[:-1], -1)


class _Malformed(ValueError):
    """A sentence fragment for the person who has the file."""


class _Walk:
    """A position in the file that only moves forward and never past the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._position = 0

    def read(self) -> tuple[dict[str, Value], dict[str, TensorEntry]]:
        if self._take(4) != b"GGUF":
            raise _Malformed("it does not begin with GGUF")
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise _Malformed(f"version {version} is not one of {_VERSIONS}")
        num_tensors = self._count(8 + 4 + 4 + 8)  # length of the name, number of dimensions, type, offset
        num_keys = self._count(8 + 4)
        metadata: dict[str, Value] = {}
        for _ in range(num_keys):
            key = self._string()
            if key in metadata:
                raise _Malformed(f"the key {key!r} stands twice")
            metadata[key] = self._value(self._scalar("I"))
        entries = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise _Malformed(f"an alignment of {alignment}")
        start = -(-self._position // alignment) * alignment
        return metadata, {entry[0]: self._place(start, *entry) for entry in entries}

    def _value(self, value_type: int, depth: int = 0) -> Value:
        if value_type == _STRING:
            return self._string()
        if value_type == _ARRAY:
            return self._skip_array(depth)
        if value_type not in _SCALARS:
            raise _Malformed(f"value type {value_type} does not exist")
        scalar: int | float | bool = self._scalar(_SCALARS[value_type])
        return scalar

    def _skip_array(self, depth: int) -> Array:
        element_type = self._scalar("I")
        if element_type in _SCALARS:
            size = struct.calcsize(_SCALARS[element_type])
            length = self._count(size)
            self._skip(length * size)
            return Array(length)
        if depth == _MAX_ARRAY_DEPTH:
            raise _Malformed(f"arrays nest deeper than {_MAX_ARRAY_DEPTH}")
        length = self._count(8)
        for _ in range(length):
            if element_type == _STRING:
                self._skip(self._count(1))
            else:
                self._value(element_type, depth + 1)
        return Array(length)

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dimensions = self._scalar("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise _Malformed(f"tensor {name} has {num_dimensions} dimensions")
        shape = tuple(self._scalar("Q") for _ in range(num_dimensions))[::-1]
        if 0 in shape:
            raise _Malformed(f"tensor {name} is empty")
        return name, shape, self._scalar("I"), self._scalar("Q")

    def _place(self, start: int, name: str, shape: tuple[int, ...], type_id: int, offset: int) -> TensorEntry:
        try:
            kind = GGMLQuantizationType(type_id)
        except ValueError as error:
            raise unsupported(f"GGUF tensor type {type_id} of {name}") from error
        block_values, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block_values:
            raise _Malformed(f"rows of {name} are {shape[-1]} long, not a multiple of {kind.name}'s {block_values}")
        num_bytes = prod(shape) // block_values * block_bytes
        if start + offset + num_bytes > len(self._data):
            raise _Malformed(f"it ends in the middle of tensor {name}")
        return TensorEntry(name, shape, kind, start + offset, num_bytes)

    def _string(self) -> str:
        return self._take(self._count(1)).decode("utf-8")

    def _count(self, element_bytes: int) -> int:
        """A 64-bit count of elements that take at least `element_bytes` each."""
        count: int = self._scalar("Q")
        if count > (len(self._data) - self._position) // element_bytes:
            raise _Malformed(f"a count of {count} runs past its end")
        return count

    def _scalar(self, code: str) -> Any:
        """An int, float or bool, as `code` says."""
        return struct.unpack(f"<{code}", self._take(struct.calcsize(code)))[0]

    def _take(self, num_bytes: int) -> bytes:
        position = self._position
        self._skip(num_bytes)
        return self._data[position : self._position]

    def _skip(self, num_bytes: int) -> None:
        self._position += num_bytes
        if self._position > len(self._data):
            raise _Malformed("it ends in the middle of its header")
