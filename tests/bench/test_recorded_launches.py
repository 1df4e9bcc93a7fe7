"""Recorded launches behave as a captured graph does."""

import pytest
import torch

from pagedd.bench.recorded_launches import capture_by_recording, record


def test_replaying_computes_again_from_the_same_memory_into_the_same_memory() -> None:
    x, out = torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3)
    replay = capture_by_recording(lambda: out.copy_((x * 2).view(3, 1).flatten() + x[1:].sum()))
    x.copy_(torch.tensor([10.0, 0.0, 1.0]))
    replay()
    assert out.tolist() == [21.0, 1.0, 3.0]


def test_what_python_decided_once_is_not_decided_again() -> None:
    x, out, factor = torch.tensor([1.0]), torch.zeros(1), [2]
    replay = capture_by_recording(lambda: out.copy_(x * factor[0]))
    factor[0] = 5
    replay()
    assert out.tolist() == [2.0]


@pytest.mark.parametrize("ask", [torch.Tensor.item, bool, torch.nonzero, lambda x: x[x > 0]])
def test_asking_for_a_value_is_an_error(ask) -> None:
    with pytest.raises(RuntimeError, match="waits for the device"):
        record(lambda: ask(torch.ones(1)))


def test_views_and_allocations_are_no_launches() -> None:
    x = torch.arange(6.0)
    recording = record(lambda: torch.add(x.view(2, 3)[1], 1, out=torch.empty(3)))
    assert len(recording.launches) == 1


def test_a_kernel_in_the_interpreter_is_one_launch_and_is_launched_again() -> None:
    from pagedd.kernels.triton.silu_and_mul import silu_and_mul

    x, out = torch.zeros(1, 4), torch.empty(1, 2)
    recording = record(lambda: out.copy_(silu_and_mul(x)))
    assert len(recording.launches) == 2
    x.fill_(1.0)
    recording.replay()
    assert out[0].tolist() == pytest.approx([0.7311, 0.7311], abs=1e-4)
