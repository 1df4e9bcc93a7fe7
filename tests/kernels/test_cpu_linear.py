"""Packed products in C++ against float64, in every form, over odd row counts."""

import pytest
import torch

FORMS = ["float32", "bf16", "int8", "int4"]


@pytest.fixture(scope="module")
def extension(cpu_extension):
    return cpu_extension


def packed(extension, weight: torch.Tensor, form: str, bias: torch.Tensor | None = None):
    return extension.PackedLinear(extension.pack(weight, form), form, weight.shape[1], bias)


def unpacked(linear, num_rows: int) -> torch.Tensor:
    """The weight as the product sees it."""
    return torch.stack([linear.row(i) for i in range(num_rows)])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("out", "inner"), [(16, 32), (48, 96), (192, 576), (32, 1536)])
def test_a_packed_weight_reads_back_within_its_form(extension, form, out, inner) -> None:
    weight = torch.randn(out, inner, generator=torch.Generator().manual_seed(out))
    steps = {"float32": 0.0, "bf16": 2**-7, "int8": 1 / 255, "int4": 1 / 15}
    groups = weight.view(out, -1, 32)
    spread = groups.amax(-1) - groups.amin(-1)
    bound = weight.abs() * steps[form]
    if form.startswith("int"):
        bound = (spread * steps[form]).repeat_interleave(32, 1)
    error = (unpacked(packed(extension, weight, form), out) - weight).abs()
    assert (error <= 0.51 * bound + 2e-3 * (form.startswith("int"))).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 7, 8, 9, 15, 33, 65, 131])
def test_products_equal_float64_on_the_weights_that_are_held(extension, form, num_rows) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    weight = torch.randn(80, 352, generator=generator) / 16
    bias = torch.randn(80, generator=generator)
    x = torch.randn(num_rows, 352, generator=generator)
    linear = packed(extension, weight, form, bias)
    exact = x.double() @ unpacked(linear, 80).double().T + bias.double()
    # Rounding of the inputs: none, 2⁻⁹ each, or half a 127th of the group's largest.
    tolerance = {"float32": 1e-5, "bf16": 0.03, "int8": 0.04, "int4": 0.04}[form]
    assert (linear.multiply(x).double() - exact).abs().max() < tolerance


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_inputs_that_int8_holds_exactly_give_exact_sums(extension, form) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(32, 64, generator=generator)
    x = torch.randint(-126, 127, (9, 64), generator=generator).float()
    x[:, ::32] = 127.0
    linear = packed(extension, weight, form)
    exact = x.double() @ unpacked(linear, 32).double().T
    assert torch.allclose(linear.multiply(x).double(), exact, rtol=1e-5, atol=1e-3)


def test_blocks_are_packed_as_they_are(extension) -> None:
    generator = torch.Generator().manual_seed(2)
    for form, levels in (("int4", 16), ("int8", 256)):
        q = torch.randint(0, levels, (32, 96), generator=generator, dtype=torch.uint8)
        scale = torch.rand(32, 3, generator=generator).half()
        offset = torch.randn(32, 3, generator=generator).half()
        expected = q.float() * scale.float().repeat_interleave(32, 1) + offset.float().repeat_interleave(32, 1)
        tiles = extension.pack_blocks(q, scale, offset, form)
        assert torch.allclose(unpacked(extension.PackedLinear(tiles, form, 96), 32), expected, rtol=1e-6)


def test_an_input_row_of_zeros_gives_the_bias(extension) -> None:
    bias = torch.arange(16.0)
    for form in FORMS:
        linear = packed(extension, torch.randn(16, 32), form, bias)
        assert torch.equal(linear.multiply(torch.zeros(1, 32))[0], bias)


def test_what_cannot_be_packed_is_refused(extension) -> None:
    with pytest.raises(RuntimeError, match="multiples of 16 and 32"):
        extension.pack(torch.zeros(16, 40), "int4")
    with pytest.raises(ValueError, match="weight form 'int2'"):
        extension.pack(torch.zeros(16, 32), "int2")
    with pytest.raises(RuntimeError, match="tiles do not have the size"):
        extension.PackedLinear(torch.zeros(1, 7, dtype=torch.uint8), "int4", 32)


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("tiny", [1e-36, 1e-38, 1e-45])
def test_a_group_of_tiny_inputs_counts_as_zeros(extension, form, tiny) -> None:
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    linear = packed(extension, weight, form)
    x = torch.ones(1, 64)
    x[0, 32:] = 0
    expected = linear.multiply(x)
    x[0, 32] = tiny
    torch.testing.assert_close(linear.multiply(x), expected)
