"""What every Triton kernel's test needs: an interpreter that rounds, and memory that shows what nobody wrote."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

_convert_float = interpreter._convert_float


def _convert_float_to_nearest(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
    """float32 → bfloat16 to the nearest, even among equals, as every card does it."""
    if source != tl.float32 or target != tl.bfloat16:
        return _convert_float(data, source, target, rounding_mode)
    bits = np.ascontiguousarray(data).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(data), (bits >> 16) | 0x40, rounded).astype(np.uint16)


@pytest.fixture(autouse=True)
def rounding_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter cuts off what does not fit a bfloat16."""
    monkeypatch.setattr(interpreter, "_convert_float", _convert_float_to_nearest)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """New float tensors hold NaN, integers their largest value, until somebody writes them."""
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(was)
