"""Which letter stands for a sequence in pictures of the pool.

It follows from the sequence's number, so that whoever looks, from whenever on, names the same sequence alike.
"""

import string
from collections.abc import Container

# S is what many share.
LETTERS = string.ascii_lowercase + string.ascii_uppercase.replace("S", "") + string.digits


def letter_index(number: int, taken: Container[int]) -> int | None:
    """Index into `LETTERS`: the number's own, or the next that is not `taken` by an older sequence; None beyond."""
    indices = ((number + step) % len(LETTERS) for step in range(len(LETTERS)))
    return next((index for index in indices if index not in taken), None)
