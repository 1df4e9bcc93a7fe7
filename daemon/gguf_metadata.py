"""Reads the key-value part of a GGUF file, and trusts none of it.

Owns the walk over the bytes, nothing of what the keys mean: `gguf_tokenizer.py` and `models.py` read tokenizer and
model facts from the result. The `gguf` package has a reader too; a file that claims 2^60 array elements keeps that one
busy for ever, and it takes seconds for a vocabulary. Here every count is held against the bytes that are left.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from pathlib import Path
from typing import Any

from pagedd.client.errors import PageddError

GgufValue = int | float | bool | str | list["GgufValue"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# value type -> struct code; sizes follow from it
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_ARRAY_DEPTH = 4
_MAX_METADATA_BYTES = 128 << 20  # a vocabulary of 256k tokens with its merges takes about 16 MiB


class _Malformed(ValueError):
    """A sentence fragment for the person who has the file."""


def read_metadata(path: Path) -> dict[str, GgufValue]:
    """All keys of the GGUF file at `path`, in file order.

    Raises:
        PageddError: `model_unavailable` when the file cannot be read, `unsupported_model` when it is not a
            well-formed little-endian GGUF of version 2 or 3.
    """
    try:
        with path.open("rb") as file:
            if not file.read(1):
                raise _Malformed("it is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(data).metadata()
    except OSError as error:
        raise PageddError("model_unavailable", f"cannot read {path}: {error.strerror}; check the path") from error
    except (_Malformed, UnicodeDecodeError) as error:
        message = f"{path} is not a well-formed GGUF file: {error}; fetch it again"
        raise PageddError("unsupported_model", message) from error


class _Reader:
    """A position in the mapped file that only moves forward and never past the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._position = 0
        self._end = min(len(data), _MAX_METADATA_BYTES)

    def metadata(self) -> dict[str, GgufValue]:
        if self._take(4) != _MAGIC:
            raise _Malformed("it does not begin with GGUF")
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise _Malformed(f"version {version} is not one of {_VERSIONS}")
        self._scalar("Q")  # number of tensors
        num_keys = self._count(12)  # a key is at least a length and a type
        metadata: dict[str, GgufValue] = {}
        for _ in range(num_keys):
            key = self._string()
            if key in metadata:
                raise _Malformed(f"the key {key!r} stands twice")
            metadata[key] = self._value(self._type(), depth=0)
        return metadata

    def _value(self, value_type: int, depth: int) -> GgufValue:
        if value_type == _STRING:
            return self._string()
        if value_type == _ARRAY:
            return self._array(depth)
        scalar: int | float | bool = self._scalar(_SCALARS[value_type])
        return scalar

    def _array(self, depth: int) -> list[GgufValue]:
        if depth == _MAX_ARRAY_DEPTH:
            raise _Malformed(f"arrays nest deeper than {_MAX_ARRAY_DEPTH}")
        element_type = self._type()
        if element_type == _STRING:
            return [self._string() for _ in range(self._count(8))]
        if element_type == _ARRAY:
            return [self._array(depth + 1) for _ in range(self._count(12))]
        code = _SCALARS[element_type]
        size = struct.calcsize(code)
        num_elements = self._count(size)
        return list(struct.unpack(f"<{num_elements}{code}", self._take(num_elements * size)))

    def _type(self) -> int:
        value_type: int = self._scalar("I")
        if value_type not in (*_SCALARS, _STRING, _ARRAY):
            raise _Malformed(f"value type {value_type} does not exist")
        return value_type

    def _string(self) -> str:
        return self._take(self._count(1)).decode("utf-8")

    def _count(self, element_bytes: int) -> int:
        """A 64-bit count of elements that take at least `element_bytes` each."""
        count: int = self._scalar("Q")
        if count > (self._end - self._position) // element_bytes:
            raise _Malformed(f"a count of {count} runs past its end")
        return count

    def _scalar(self, code: str) -> Any:
        """An int, float or bool, as `code` says."""
        return struct.unpack(f"<{code}", self._take(struct.calcsize(code)))[0]

    def _take(self, num_bytes: int) -> bytes:
        end = self._position + num_bytes
        if end > self._end:
            raise _Malformed("it ends in the middle of its metadata")
        taken = self._data[self._position : end]
        self._position = end
        return taken
