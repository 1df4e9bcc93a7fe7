"""Keys of full blocks in Triton against the specification, to the last bit."""

from dataclasses import replace

import pytest
import torch

from pagedd.kernels import reference
from pagedd.kernels.triton import close_blocks as module
from pagedd.kernels.triton.close_blocks import close_blocks


def expect_same_bytes(batch) -> None:
    layer = batch.kv_layer
    expected = replace(layer, planes=tuple(plane.clone() for plane in layer.planes))
    close_blocks(layer, batch)
    reference.close_blocks(expected, batch)
    assert all(map(torch.equal, layer.planes, expected.planes))


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("head_dim", [16, 64, 80])
def test_steps_that_fill_no_block_one_and_several(paged, block_size, head_dim) -> None:
    lens = [(1, 40), (1, 64), (70, 70), (33, 96), (3, 33), (1, 1)]
    expect_same_bytes(paged(lens, block_size=block_size, head_dim=head_dim, form="int4"))


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")  # of numpy, on what becomes NaN
def test_numbers_of_every_size_and_some_that_are_none(paged) -> None:
    batch = paged([(32, 32)], block_size=16, head_dim=64, form="int4")
    open_keys = batch.kv_layer.open_keys
    open_keys.mul_(10.0 ** torch.linspace(-38, 38, 64))
    open_keys[:, 0, 3, :6] = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 3e38])
    open_keys[:, 1, :, :2] = torch.tensor([0.0, -0.0])
    expect_same_bytes(batch)


def test_variants_say_what_compiling_them_needs() -> None:
    for variant in module.variants(90):
        assert set(variant.signature) == set(variant.kernel.arg_names)
        assert set(variant.constants) == {name for name, kind in variant.signature.items() if kind == "constexpr"}
