"""A GGUF file's header, its metadata and its table of tensors, walked with no trust in any of it. No torch, no numpy.

Owns the walk over the bytes: every count is held against what is left of the file. `gguf_file.py` reads by it, and adds
the tensors' bytes; so does the daemon, for the vocabulary. The `gguf` package has a reader too, which takes seconds for
a vocabulary, and for ever for a file that claims 2⁶⁰ elements.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from dataclasses import dataclass
from typing import Any

_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# value type -> struct code; sizes follow from it
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_DIMENSIONS = 4
_MAX_ARRAY_DEPTH = 4
_MAX_HEADER_BYTES = 128 << 20  # a vocabulary of 256k tokens with its merges takes about 16 MiB


class MalformedGGUF(ValueError):
    """A sentence fragment for the person who has the file."""


@dataclass(frozen=True, slots=True)
class SkippedArray:
    """Stands for an array that was not asked for: a vocabulary is large."""

    length: int


Value = int | float | bool | str | list["Value"] | SkippedArray


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One row of the table of tensors, as it stands there.

    Attributes:
        shape: outermost dimension first, as numpy has it; the file has it the other way round.
        type_id: of ggml's quantization types.
        offset: of its first byte, from `GGUFHeader.data_start`.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


class GGUFHeader:
    """A position in the mapped file that only moves forward and never past the end.

    Call `read_metadata`, then, if they are wanted, `read_tensors`. Both raise `MalformedGGUF`, also for text that is no
    UTF-8.
    """

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._position = 0
        self._end = min(len(data), _MAX_HEADER_BYTES)
        self._num_tensors = 0

    def read_metadata(self, *, with_arrays: bool) -> dict[str, Value]:
        """Every key, in the file's order. Arrays are lists, or without `with_arrays` a `SkippedArray` each."""
        if self._take(4) != b"GGUF":
            raise MalformedGGUF("it does not begin with GGUF")
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise MalformedGGUF(f"version {version} is not one of {_VERSIONS}")
        self._num_tensors = self._count(8 + 4 + 4 + 8)  # length of the name, number of dimensions, type, offset
        metadata: dict[str, Value] = {}
        for _ in range(self._count(8 + 4)):  # a key is at least a length and a type
            key = self._string()
            if key in metadata:
                raise MalformedGGUF(f"the key {key!r} stands twice")
            metadata[key] = self._value(self._type(), with_arrays, depth=0)
        return metadata

    def read_tensors(self) -> list[TensorInfo]:
        """The table of tensors, in the file's order."""
        return [self._tensor() for _ in range(self._num_tensors)]

    def data_start(self, alignment: int) -> int:
        """Where the tensors' bytes begin, once the header has been read."""
        return -(-self._position // alignment) * alignment

    def _value(self, value_type: int, with_arrays: bool, depth: int) -> Value:
        if value_type == _STRING:
            return self._string()
        if value_type == _ARRAY:
            return self._array(with_arrays, depth)
        scalar: int | float | bool = self._scalar(_SCALARS[value_type])
        return scalar

    def _array(self, with_arrays: bool, depth: int) -> list[Value] | SkippedArray:
        if depth == _MAX_ARRAY_DEPTH:
            raise MalformedGGUF(f"arrays nest deeper than {_MAX_ARRAY_DEPTH}")
        element_type = self._type()
        if element_type in _SCALARS:
            code = _SCALARS[element_type]
            size = struct.calcsize(code)
            length = self._count(size)
            if with_arrays:
                return list(struct.unpack(f"<{length}{code}", self._take(length * size)))
            self._skip(length * size)
            return SkippedArray(length)
        length = self._count(8 if element_type == _STRING else 4 + 8)
        if with_arrays:
            return [self._value(element_type, True, depth + 1) for _ in range(length)]
        for _ in range(length):
            if element_type == _STRING:
                self._skip(self._count(1))
            else:
                self._array(False, depth + 1)
        return SkippedArray(length)

    def _tensor(self) -> TensorInfo:
        name = self._string()
        num_dimensions = self._scalar("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise MalformedGGUF(f"tensor {name} has {num_dimensions} dimensions")
        shape = tuple(self._scalar("Q") for _ in range(num_dimensions))[::-1]
        if 0 in shape:
            raise MalformedGGUF(f"tensor {name} is empty")
        return TensorInfo(name, shape, self._scalar("I"), self._scalar("Q"))

    def _type(self) -> int:
        value_type: int = self._scalar("I")
        if value_type not in (*_SCALARS, _STRING, _ARRAY):
            raise MalformedGGUF(f"value type {value_type} does not exist")
        return value_type

    def _string(self) -> str:
        raw = self._take(self._count(1))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise MalformedGGUF(str(error)) from error

    def _count(self, element_bytes: int) -> int:
        """A 64-bit count of elements that take at least `element_bytes` each."""
        count: int = self._scalar("Q")
        if count > (self._end - self._position) // element_bytes:
            raise MalformedGGUF(f"a count of {count} runs past its end")
        return count

    def _scalar(self, code: str) -> Any:
        """An int, float or bool, as `code` says."""
        return struct.unpack(f"<{code}", self._take(struct.calcsize(code)))[0]

    def _take(self, num_bytes: int) -> bytes:
        position = self._position
        self._skip(num_bytes)
        return self._data[position : self._position]

    def _skip(self, num_bytes: int) -> None:
        if self._position + num_bytes > self._end:
            raise MalformedGGUF("it ends in the middle of its header")
        self._position += num_bytes
