"""A GGUF file's metadata, vocabulary and all, for the daemon.

The walk over the bytes is `pagedd.engine.model.gguf_header`'s; here it gets a file and errors that people understand.
`gguf_tokenizer.py` and `prepare.py` read tokenizer and model facts from the result.
"""

import mmap
from pathlib import Path

from pagedd.client.errors import PageddError
from pagedd.engine.model.gguf_header import GGUFHeader, MalformedGGUF
from pagedd.engine.model.gguf_header import Value as GgufValue

__all__ = ["GgufValue", "read_metadata"]


def read_metadata(path: Path) -> dict[str, GgufValue]:
    """All keys of the GGUF file at `path`, in file order; arrays are lists.

    Raises:
        PageddError: `model_unavailable` when the file cannot be read, `unsupported_model` when it is not a
            well-formed little-endian GGUF of version 2 or 3.
    """
    try:
        with path.open("rb") as file:
            if not file.read(1):
                raise MalformedGGUF("it is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return GGUFHeader(data).read_metadata(with_arrays=True)
    except OSError as error:
        raise PageddError("model_unavailable", f"cannot read {path}: {error.strerror}; check the path") from error
    except MalformedGGUF as error:
        message = f"{path} is not a well-formed GGUF file: {error}; fetch it again"
        raise PageddError("unsupported_model", message) from error
