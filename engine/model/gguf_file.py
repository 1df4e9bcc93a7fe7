"""The container: a GGUF file's scalar metadata, and each tensor's place and bytes. No torch.

Owns where a tensor lies, and that all of it is in the file; the header is walked by `gguf_header.py`. What the keys and
tensors mean is `gguf.py`'s. The `gguf` package's table of quantization types is used.
"""

import mmap
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from pagedd.engine.errors import EngineError
from pagedd.engine.model.gguf_header import GGUFHeader, MalformedGGUF, TensorInfo
from pagedd.engine.model.json_fields import malformed, unsupported


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
        metadata: every key, arrays as `SkippedArray`: the engine needs nothing that is in one.
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
            header = GGUFHeader(self._data)
            self.metadata = header.read_metadata(with_arrays=False)
            infos = header.read_tensors()
            alignment = self.metadata.get("general.alignment", 32)
            if not isinstance(alignment, int) or alignment < 1:
                raise MalformedGGUF(f"an alignment of {alignment}")
            start = header.data_start(alignment)
            self.tensors = {info.name: self._place(start, info) for info in infos}
        except MalformedGGUF as error:
            raise malformed(f"{path} is not a well-formed GGUF file: {error}") from error

    def read(self, entry: TensorEntry) -> NDArray[np.uint8]:
        """The tensor's bytes, [*outer dimensions, bytes per row], read-only."""
        data = np.frombuffer(self._data, dtype=np.uint8, count=entry.num_bytes, offset=entry.offset)
        return data.reshape(*entry.shape[:-1], -1)

    def _place(self, start: int, info: TensorInfo) -> TensorEntry:
        name, shape = info.name, info.shape
        try:
            kind = GGMLQuantizationType(info.type_id)
        except ValueError as error:
            raise unsupported(f"GGUF tensor type {info.type_id} of {name}") from error
        block_values, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block_values:
            raise MalformedGGUF(f"rows of {name} are {shape[-1]} long, not a multiple of {kind.name}'s {block_values}")
        num_bytes = prod(shape) // block_values * block_bytes
        if start + info.offset + num_bytes > len(self._data):
            raise MalformedGGUF(f"it ends in the middle of tensor {name}")
        return TensorEntry(name, shape, kind, start + info.offset, num_bytes)
