"""Arrays on their way to a device: torch's `meta` device stands for one that must not be waited for."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pagedd.engine import staging
from pagedd.engine.batch import build_batch
from pagedd.engine.draw import PendingTokens
from pagedd.engine.request import Request
from pagedd.engine.sampler import Sampler
from pagedd.engine.sampling_params import SamplingParams
from pagedd.engine.sequence import PENDING, Sequence
from pagedd.engine.staging import to_device
from pagedd.engine.step import ScheduledSequence
from pagedd.kernels import ops

META = torch.device("meta")


class CopiesFromPinnedMemory(TorchDispatchMode):
    """Fails at whatever takes numbers to the device otherwise. What asks a `meta` tensor for a value fails by itself.

    Attributes:
        num_copies: to the device.
    """

    def __init__(self, pinned: set[int]) -> None:
        super().__init__()
        self._pinned = pinned
        self.num_copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given, made = (
            [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)] for tree in ((args, kwargs), result)
        )
        on_host = [tensor for tensor in given if tensor.device.type == "cpu" and tensor.ndim]
        if on_host and any(tensor.device == META for tensor in (*given, *made)):
            assert func.name() == "aten::_to_copy", f"{func.name()} takes numbers of the host"
            assert kwargs["non_blocking"], "a copy that is waited for"
            assert {tensor.data_ptr() for tensor in on_host} <= self._pinned, "a copy from ordinary memory"
            self.num_copies += 1
        return result


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Addresses of what stands for pinned memory, which only a machine with a GPU has."""
    kept: list[torch.Tensor] = []
    addresses: set[int] = set()

    def pinned_bytes(size: int) -> torch.Tensor:
        kept.append(torch.empty(max(1, size), dtype=torch.uint8)[:size])
        addresses.add(kept[-1].data_ptr())
        return kept[-1]

    monkeypatch.setattr(staging, "pinned_bytes", pinned_bytes)
    return addresses


def sequence(params: SamplingParams, *, is_pending: bool = False) -> Sequence:
    return Sequence(
        request=Request(request_id="r", prompt_token_ids=[1, 2], params=params),
        choice_index=0,
        token_ids=[1, 2, 3, PENDING] if is_pending else [1, 2, 3],
        num_prompt_tokens=2,
        arrival_s=0.0,
        due_s=0.0,
        order=0,
        priority=0,
        block_table=[0],
    )


def test_arrays_of_all_kinds_arrive_as_they_are_in_one_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = [
        np.arange(3, dtype=np.int64),
        np.array([True, False, True]),
        np.empty((0,), dtype=np.int64),
        np.arange(10, dtype=np.int32).reshape(2, 5)[:, ::2],
        np.array([[0.1, 0.2]]),
        np.array([7.5], dtype=np.float32),
    ]
    copies = []

    class OtherDevice:
        """The host, but not by that name."""

        type = "other"

    monkeypatch.setattr(staging, "pinned_bytes", lambda size: torch.empty(size, dtype=torch.uint8))
    to = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *a, **k: copies.append(k) or to(self, "cpu", copy=True))
    there = to_device(arrays, OtherDevice())
    assert copies == [{"non_blocking": True}]
    for array, tensor in zip(arrays, there, strict=True):
        assert tensor.shape == array.shape
        np.testing.assert_array_equal(tensor.numpy(), array)
        assert tensor.data_ptr() % 16 == there[0].data_ptr() % 16


def test_on_the_host_nothing_is_copied() -> None:
    array = np.arange(4)
    (there,) = to_device([array], torch.device("cpu"))
    array[0] = 9
    assert there.tolist() == [9, 1, 2, 3]


def test_a_batch_goes_to_the_device_in_one_copy(pinned) -> None:
    items = [ScheduledSequence(s, 2, 1, [s]) for s in (sequence(SamplingParams(max_tokens=9)) for _ in range(3))]
    with CopiesFromPinnedMemory(pinned) as mode:
        batch = build_batch(items, 16, META)
    assert mode.num_copies == 1
    assert batch.token_ids.device == batch.attention.block_tables.device == META


@pytest.mark.parametrize(
    "kinds",
    [
        [{"temperature": 0.0}],
        [{}, {"temperature": 0.0}, {"top_k": 3, "min_p": 0.1}, {"top_p": 0.5}],
        [{"logit_bias": {3: 1.0}, "num_logprobs": 2}, {"min_tokens": 9, "stop_token_ids": (4,)}],
        [{"repetition_penalty": 1.5}, {"frequency_penalty": 0.5, "top_p": 0.9, "num_logprobs": 0}, {}],
    ],
)
@pytest.mark.parametrize("is_pending", [False, True])
def test_drawing_waits_for_nothing(pinned, monkeypatch: pytest.MonkeyPatch, kinds, is_pending: bool) -> None:
    # In torch it waits, in Triton it does not.
    monkeypatch.setattr(ops, "keep_best", lambda logits, weights, limits, shares: None)
    sequences = [sequence(SamplingParams(max_tokens=99, **params), is_pending=is_pending) for params in kinds]
    newest = torch.empty(len(kinds), dtype=torch.int64, device=META)
    pending = PendingTokens({s: i for i, s in enumerate(sequences)}, newest)
    with CopiesFromPinnedMemory(pinned):
        draw = Sampler().draw(torch.empty(len(kinds), 50, device=META), sequences, None, pending)
    assert draw.tokens.shape == draw.is_sound.shape == (len(kinds),)
