"""One reader of bytes from outside, as a fuzzer sees it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pagedd.client.errors import ERROR_KINDS, PageddError
from pagedd.engine.errors import EngineError

_MAX_MESSAGE_CHARS = 2000


@dataclass(frozen=True, slots=True)
class Target:
    """`read` takes any bytes, and raises only for what is a fault; `seeds` are right, or nearly.

    `weight` is its share of the inputs, beside the others'; less for slow ones.
    """

    read: Callable[[bytes], None]
    seeds: Sequence[bytes]
    weight: int = 8
    max_bytes: int = 4096


def check_refusal(error: PageddError | EngineError) -> None:
    """Raises `AssertionError` for a refusal that is no answer to bad input, or repeats all of it."""
    assert error.code in ERROR_KINDS, error.code
    assert ERROR_KINDS[error.code].http_status < 500, error
    assert len(str(error)) <= _MAX_MESSAGE_CHARS, len(str(error))
