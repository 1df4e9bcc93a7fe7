"""Small arrays on their way to the device: all of a step's in one transfer, which nobody waits for.

A copy from ordinary memory first waits for what the device has been told before, and a step that was launched ahead
would have to end before the next could be. From pinned memory it takes its turn like a kernel. Owns that memory; torch
gives it to somebody else only once the copy is done.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_ALIGNMENT = 16  # bytes: what kernels ask of a pointer that they load 16 bytes from


def to_device(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """The arrays as tensors of the same shapes and dtypes on `device`; where that is the host, they share memory."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    starts, end = [], 0
    for array in arrays:
        starts.append(end)
        end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    staged = pinned_bytes(end)
    on_host = staged.numpy()
    for start, array in zip(starts, arrays, strict=True):
        on_host[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    copied = staged.to(device, non_blocking=True)
    return [
        copied[start : start + array.nbytes].view(_dtype(array)).view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]


def pinned_bytes(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def _dtype(array: NDArray[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
