"""Every storage form of a weight gives the plain product."""

import weakref

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pagedd.engine.model import linear as linear_module
from pagedd.engine.model.linear import PackedLinear, PlainLinear, QuantizedLinear, make_linear
from pagedd.engine.model.weight_blocks import NestedBlocks, WeightBlocks


class Peak(TorchDispatchMode):
    """Bytes of all tensors alive that torch's operations made while it is entered, at their most."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        result = operation(*arguments, **(options or {}))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and (address := storage.data_ptr()) not in self._alive:
                self._alive[address] = storage.nbytes()
                weakref.finalize(storage, self._alive.pop, address, None)
        self.num_bytes = max(self.num_bytes, sum(self._alive.values()))
        return result


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


@pytest.mark.parametrize("kind", ["plain", "nested"])
def test_packing_on_the_device_takes_what_is_kept_and_one_slice(kind, monkeypatch) -> None:
    out_features, in_features, at_once = 512, 1024, 16 * 1024
    monkeypatch.setattr(linear_module, "_PACKED_AT_ONCE", at_once)
    q = np.random.default_rng(1).integers(0, 16, (out_features, in_features), dtype=np.uint8)
    blocks: WeightBlocks | NestedBlocks
    if kind == "plain":
        scale = np.ones((out_features, in_features // 32), dtype=np.float16)
        blocks = WeightBlocks(4, q, scale, -scale)
    else:
        scale = np.ones((out_features, in_features // 256), dtype=np.float16)
        s = np.random.default_rng(2).integers(1, 9, (out_features, in_features // 16), dtype=np.int8)
        blocks = NestedBlocks(8, 16, q, s, s, scale, scale)
    with Peak() as peak:
        kept = QuantizedLinear(blocks, None, torch.device("cpu"))
    assert kept.num_bytes < peak.num_bytes <= kept.num_bytes + 7 * at_once
    whole = linear_module._pack_slice(blocks, torch.device("cpu"))
    assert torch.equal(kept._weight.dequantize(), whole.dequantize())
