"""Memory that was freed but not given back: an allocator keeps it, in case it is asked for again. No torch."""

import ctypes


def return_freed_memory() -> None:
    """Gives it back to the system; nothing with a C library other than glibc.

    To be called once after loading, which holds for a moment about as much again as what stays.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
