"""Every storage form of a weight gives the plain product."""

import numpy as np
import pytest
import torch

from pagedd.engine.model.linear import PackedLinear, PlainLinear, QuantizedLinear, make_linear
from pagedd.engine.model.weight_blocks import WeightBlocks


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


@pytest.mark.parametrize("bits", [4, 8])
def test_a_weight_that_stays_quantized_gives_the_product_of_its_own_numbers(bits) -> None:
    generator = np.random.default_rng(bits)
    blocks = WeightBlocks(
        bits,
        generator.integers(0, 1 << bits, (24, 96), dtype=np.uint8),
        generator.normal(size=(24, 3)).astype(np.float16),
        generator.normal(size=(24, 3)).astype(np.float16),
    )
    weight = blocks.q.reshape(24, 3, 32) * blocks.scale[..., None].astype(float) + blocks.offset[..., None]
    x, bias = torch.randn(5, 96, dtype=torch.float64), torch.randn(24)
    linear = QuantizedLinear(blocks, bias, torch.device("cpu"))
    expected = x @ torch.from_numpy(weight.reshape(24, 96)).T + bias
    torch.testing.assert_close(linear(x.float()).double(), expected, rtol=1e-4, atol=1e-4)
    assert linear.num_bytes == 24 * 96 * bits // 8 + 24 * 3 * 4 + 24 * 4
