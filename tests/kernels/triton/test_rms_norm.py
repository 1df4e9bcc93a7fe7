"""RMSNorm in Triton against the specification."""

import pytest
import torch

from pagedd.kernels import reference
from pagedd.kernels.triton import rms_norm as op

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@DTYPES
@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (3, 64), (17, 80), (5, 576), (2, 4096)])
def test_rms_norm_equals_the_reference(dtype: torch.dtype, num_rows: int, size: int) -> None:
    x, weight = torch.randn(num_rows, size).to(dtype), torch.randn(size).to(dtype)
    close(op.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


@DTYPES
@pytest.mark.parametrize(("num_rows", "size"), [(1, 40), (7, 576), (2, 4096)])
def test_add_rms_norm_gives_the_rounded_sum_and_its_norm(dtype: torch.dtype, num_rows: int, size: int) -> None:
    x, residual = torch.randn(2, num_rows, size).to(dtype)
    weight = torch.randn(size).to(dtype)
    y, total = op.add_rms_norm(x, residual, weight, 1e-6)
    expected, expected_total = reference.add_rms_norm(x, residual, weight, 1e-6)
    close(y, expected)
    assert torch.equal(total, expected_total)


def test_the_heads_of_a_view_into_wider_rows_are_read_where_they_lie() -> None:
    heads = torch.randn(5, 7, 64)
    heads[:, 4:] = float("nan")
    weight = torch.randn(64)
    close(op.rms_norm(heads[:, 1:4], weight, 1e-5), reference.rms_norm(heads[:, 1:4], weight, 1e-5))


def test_inputs_are_left_as_they_are() -> None:
    x, residual = torch.randn(2, 3, 40)
    before = x.clone(), residual.clone()
    op.add_rms_norm(x, residual, torch.randn(40), 1e-6)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


def test_eps_keeps_a_row_of_zeros_finite() -> None:
    assert torch.equal(op.rms_norm(torch.zeros(1, 64), torch.ones(64), 1e-5), torch.zeros(1, 64))


def test_no_rows_are_no_work() -> None:
    assert op.rms_norm(torch.empty(0, 64), torch.ones(64), 1e-5).shape == (0, 64)


def test_rows_that_lie_further_apart_than_32_bits_count_are_read_at_their_place() -> None:
    """Two heads, 2³² bytes apart: an offset of 2³¹ numbers or more, in a buffer of which only two pages are touched."""
    stride = 2**31 + 64
    far = torch.UntypedStorage(2 * (stride + 64))
    heads = torch.tensor([], dtype=torch.bfloat16).set_(far, 0, (1, 2, 64), (2 * stride, stride, 1))
    heads.copy_(torch.randn(1, 2, 64))
    weight = torch.ones(64, dtype=torch.bfloat16)
    close(op.rms_norm(heads, weight, 1e-5), reference.rms_norm(heads, weight, 1e-5))


def test_a_row_too_long_for_a_program_is_refused() -> None:
    with pytest.raises(ValueError, match="32768"):
        op.rms_norm(torch.zeros(1, 40_000), torch.ones(40_000), 1e-5)
