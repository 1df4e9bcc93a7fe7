"""What an exception says of the device: whether memory ran out, and what it means while a model loads. No torch.

Owns the texts by which libraries are understood. What follows from a fault is `engine.py`'s, while it serves, and
`daemon/restart_policy.py`'s, when nothing could be loaded.
"""

from collections.abc import Callable

from pagedd.engine.errors import DeviceLostError, EngineError
from pagedd.kernels.errors import UnfitError

# Of a CPU's allocator, of CUDA, of cuBLAS, which says the last of a handle that finds no memory for its workspace.
_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED")


def is_out_of_memory(error: Exception) -> bool:
    """Of the device or of the host."""
    # torch raises its own subclass of RuntimeError, which must not be imported here; a CPU raises MemoryError or a
    # RuntimeError that names its allocator.
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY))
    )


def load_refusal(error: Exception, check_device: Callable[[], None]) -> EngineError | None:
    """What a fault of loading is to those who decide whether to try again; None: a fault of pagedd.

    Args:
        check_device: raises `DeviceLostError` when the device answers nothing any more.
    """
    if isinstance(error, UnfitError):
        return EngineError("unsupported_model", f"{error}; use device cpu")
    if is_out_of_memory(error):
        return EngineError(
            "out_of_memory",
            f"memory ran out while the model loaded ({_first_line(error)}); free some, take a smaller model or more "
            "bits off its weights, or lower max_num_batched_tokens or max_num_seqs",
        )
    try:
        check_device()
    except DeviceLostError as lost:
        return EngineError("device_unavailable", f"{_first_line(lost)}, while the model loaded; look at the driver")
    return None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
