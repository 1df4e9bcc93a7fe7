"""SwiGLU's middle in Triton against the specification."""

import pytest
import torch

from pagedd.kernels import reference
from pagedd.kernels.triton.silu_and_mul import silu_and_mul

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("shape", [(1, 2), (3, 80), (2, 3, 2 * 1536), (2, 2 * 2500)], ids=str)
def test_it_equals_the_reference_and_leaves_its_input(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape).to(dtype)
    before = x.clone()
    close(silu_and_mul(x), reference.silu_and_mul(x))
    assert torch.equal(x, before)


@pytest.mark.filterwarnings("ignore:overflow")  # of numpy, which computes the exponential of a closed gate
def test_gates_far_from_zero_are_closed_or_open_and_never_nan() -> None:
    x = torch.tensor([[-1e4, 1e4, -100.0, 100.0, 3.0, 3.0, 3.0, 3.0]])
    close(silu_and_mul(x), torch.tensor([[0.0, 3e4, 0.0, 300.0]]))


def test_a_view_with_gaps_is_read_as_what_it_shows() -> None:
    wide = torch.randn(3, 200)
    close(silu_and_mul(wide[:, 20:100]), reference.silu_and_mul(wide[:, 20:100]))


def test_no_rows_are_no_work() -> None:
    assert silu_and_mul(torch.empty(0, 64)).shape == (0, 32)
