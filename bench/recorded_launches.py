"""What a function launches, recorded on a CPU: a stand-in for a CUDA graph, and a count of launches.

As in a capture, Python runs once. Replaying launches the same kernels with the same arguments again, so whatever Python
decided by lengths or by values is not decided again, and to ask a tensor for its value is an error. Kernels of Triton
are launched in the interpreter.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_WAITING = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select"}
_ALLOCATING = ("aten::empty", "aten::new_empty")


class Recording:
    """Launches in their order; each computes into the memory that it first had."""

    def __init__(self) -> None:
        self.launches: list[Callable[[], object]] = []

    def replay(self) -> None:
        for launch in self.launches:
            launch()


def record(function: Callable[[], object]) -> Recording:
    """Runs `function` once.

    Raises:
        RuntimeError: it asks for a value, for which a device would have to be waited for.
    """
    recording = Recording()
    with _noting_triton(recording), _NoteOperations(recording):
        function()
    return recording


def capture_by_recording(function: Callable[[], object]) -> Callable[[], object]:
    """A `Capture` of `engine/cuda_graphs.py`."""
    return record(function).replay


class _NoteOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operations of torch that compute something: views and allocations launch nothing."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.name(), kwargs or {}
        by_mask = name.startswith("aten::index") and any(part.dtype == torch.bool for part in _tensors(args[1]))
        if by_mask or name.split(".")[0] in _WAITING:
            raise RuntimeError(f"{name} waits for the device, which a capture may not")
        result = func(*args, **kwargs)
        given = {_memory(tensor) for tensor in _tensors((args, kwargs))}
        is_view = not func._schema.is_mutable and all(_memory(tensor) in given for tensor in _tensors(result))
        if not is_view and not name.startswith(_ALLOCATING):
            self._recording.launches.append(partial(_compute_again, func, args, kwargs, result))
        return result


def _compute_again(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    for new, old in zip(_tensors(func(*args, **kwargs)), _tensors(result), strict=True):
        if _memory(new) != _memory(old):
            old.copy_(new)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> int:
    # oneDNN's own layouts, which weights may have on a CPU, hide theirs; nothing is a view of one.
    return id(tensor) if tensor.is_mkldnn else tensor.untyped_storage().data_ptr()


@contextmanager
def _noting_triton(recording: Recording) -> Iterator[None]:
    """Notes a kernel as one launch, and not what the interpreter does to run it."""
    from triton.runtime.interpreter import GridExecutor

    run: Callable[..., Any] = GridExecutor.__call__

    def noted(executor: Any, *args: Any, **kwargs: Any) -> None:
        recording.launches.append(partial(run, executor, *args, **kwargs))
        with torch._C._DisableTorchDispatch():
            run(executor, *args, **kwargs)

    GridExecutor.__call__ = noted
    try:
        yield
    finally:
        GridExecutor.__call__ = run
