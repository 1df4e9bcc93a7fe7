"""One reader of bytes from outside, as a fuzzer sees it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pagedd.client.errors import ERROR_KINDS, PageddError

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


def check_refusal(error: PageddError) -> None:
    """Raises `AssertionError` for a refusal that is no answer to bad input, or repeats all of it."""
    assert error.code in ERROR_KINDS, error.code
    assert error.http_status < 500, error
    assert len(error.message) <= _MAX_MESSAGE_CHARS, len(error.message)
