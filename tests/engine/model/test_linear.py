"""Every storage form of a weight gives the plain product."""

import pytest
import torch

from pagedd.engine.model.linear import PackedLinear, PlainLinear, make_linear


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("num_rows", [1, 3, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_product_equals_that_of_float64(dtype, num_rows, has_bias) -> None:
    x, weight = torch.randn(num_rows, 72).to(dtype), torch.randn(50, 72).to(dtype)
    bias = torch.randn(50).to(dtype) if has_bias else None
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    y = make_linear(weight, bias)(x)
    assert y.dtype == dtype
    relative = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    torch.testing.assert_close(y.double(), expected, rtol=relative, atol=relative * 10)


def test_float32_on_a_cpu_is_packed_and_float16_is_not() -> None:
    assert isinstance(make_linear(torch.zeros(4, 4)), PackedLinear)
    assert isinstance(make_linear(torch.zeros(4, 4, dtype=torch.float16)), PlainLinear)


def test_bytes_count_weight_and_bias() -> None:
    assert make_linear(torch.zeros(5, 4), torch.zeros(5)).num_bytes == 5 * 4 * 4 + 5 * 4
    assert make_linear(torch.zeros(5, 4, dtype=torch.float16)).num_bytes == 5 * 4 * 2
