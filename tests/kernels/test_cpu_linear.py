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


# ---- products of many rows, for which weights are widened to 8 bits --------------------------------------------------

WIDE_RANGE = 192  # inputs for which a wide weight's scale holds


@pytest.fixture(scope="module")
def least_wide_rows(extension) -> int:
    if extension.LEAST_WIDE_ROWS is None:
        pytest.skip("this processor has no wide products")
    return extension.LEAST_WIDE_ROWS


def blocks(out: int, inner: int, form: str, seed: int = 0, offsets: float = 1.0):
    """Random numbers, scales of both signs and of very different size, offsets of both signs."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 16 if form == "int4" else 256, (out, inner), generator=generator, dtype=torch.uint8)
    scale = torch.randn(out, inner // 32, generator=generator) * torch.rand(out, 1, generator=generator) ** 4
    offset = offsets * torch.randn(out, inner // 32, generator=generator)
    return q, (scale / (15 if form == "int4" else 255)).half(), offset.half()


def packed_blocks(extension, q, scale, offset, form: str, bias: torch.Tensor | None = None):
    return extension.PackedLinear(extension.pack_blocks(q, scale, offset, form), form, q.shape[1], bias)


def wide_bound(x: torch.Tensor, q, scale, offset, form: str) -> torch.Tensor:
    """[rows, out]: what rounding may change at most, of weights in ranges of 192 and of inputs in groups of 32."""
    levels, steps = (15, 0.54) if form == "int4" else (255, 0.76)
    largest = torch.maximum(offset.float().abs(), (offset.float() + levels * scale.float()).abs()).double()
    bound = torch.zeros(len(x), len(q), dtype=torch.float64)
    for start in range(0, x.shape[1], WIDE_RANGE):
        groups = range(start // 32, min(start + WIDE_RANGE, x.shape[1]) // 32)
        step = steps * largest[:, list(groups)].amax(1) / 126
        for group in groups:
            inputs = x[:, 32 * group : 32 * group + 32].double().abs()
            x_error = 0.51 * inputs.amax(1) / 127
            bound += inputs.sum(1)[:, None] * step + x_error[:, None] * 32 * (largest[:, group] + step)
    return bound


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("inner", [32, 160, 192, 224, 576, 1120])
def test_wide_products_stay_within_what_rounding_may_change(extension, least_wide_rows, form, inner) -> None:
    parts = blocks(80, inner, form, seed=inner)
    bias = torch.randn(80, generator=torch.Generator().manual_seed(1))
    linear = packed_blocks(extension, *parts, form, bias)
    x = torch.randn(least_wide_rows + 3, inner, generator=torch.Generator().manual_seed(2))
    y = linear.multiply(x, may_be_wide=True)
    exact = x.double() @ unpacked(linear, 80).double().T + bias.double()
    error = (y.double() - exact).abs()
    assert (error <= wide_bound(x, *parts, form) + 1e-5 * exact.abs().max()).all()
    assert error.norm() < 0.02 * exact.norm()
    assert inner == 32 or not torch.equal(y, linear.multiply(x))


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_the_least_number_of_rows_is_where_products_become_wide(extension, least_wide_rows, form) -> None:
    linear = packed_blocks(extension, *blocks(48, 224, form), form)
    x = torch.randn(513 + 8, 224, generator=torch.Generator().manual_seed(3))
    narrow = linear.multiply(x)
    below = x[: least_wide_rows - 1]
    assert torch.equal(linear.multiply(below, may_be_wide=True), narrow[: least_wide_rows - 1])
    wide = linear.multiply(x, may_be_wide=True)
    for num_rows in [*range(least_wide_rows, least_wide_rows + 9), 511, 512, 513]:
        y = linear.multiply(x[:num_rows], may_be_wide=True)
        assert torch.equal(y, wide[:num_rows])  # of the rows beside it a row knows only that they are many
        assert not torch.equal(y, narrow[:num_rows])


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("out", [16, 32, 80])
def test_every_epilogue_takes_the_same_sums(extension, least_wide_rows, form, out) -> None:
    bias = torch.randn(out, generator=torch.Generator().manual_seed(4))
    linear = packed_blocks(extension, *blocks(out, 224, form), form, bias)
    x = torch.randn(600, 224, generator=torch.Generator().manual_seed(5))
    for may_be_wide in (False, True):
        stored = linear.multiply(x, may_be_wide)
        before = torch.randn(600, out, generator=torch.Generator().manual_seed(6))
        added = linear.multiply(x, may_be_wide, "add", before.clone())
        assert torch.equal(added, before + stored)
        if out % 32 == 0:
            gate, up = stored.view(600, -1, 2, 16).unbind(2)
            expected = (torch.nn.functional.silu(gate.double()) * up).flatten(1)
            gated = linear.multiply(x, may_be_wide, "silu_and_mul")
            torch.testing.assert_close(gated.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_weights_of_one_value_are_exact_in_a_wide_product(extension, least_wide_rows, form) -> None:
    """Scale 0: what is left of a weight is its offset, and 126 of 126 steps hold that exactly."""
    q, scale, offset = blocks(16, 384, form)
    scale.zero_()
    offset[:] = offset[:, :1]
    linear = packed_blocks(extension, q, scale, offset, form)
    x = torch.randint(-126, 127, (least_wide_rows, 384), generator=torch.Generator().manual_seed(7)).float()
    x[:, ::32] = 127.0
    exact = x.double().sum(1)[:, None] * offset[:, 0].double()
    torch.testing.assert_close(linear.multiply(x, may_be_wide=True).double(), exact, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("may_be_wide", [False, True])
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["scale", "offset"])
@pytest.mark.parametrize("group", [0, 5, 6])
def test_a_weight_that_is_no_number_leaves_none_in_its_column_and_no_other(
    extension, least_wide_rows, form, may_be_wide, broken, part, group
) -> None:
    q, scale, offset = blocks(32, 224, form)
    x = torch.randn(least_wide_rows, 224, generator=torch.Generator().manual_seed(9))
    expected = packed_blocks(extension, q, scale, offset, form).multiply(x, may_be_wide)
    {"scale": scale, "offset": offset}[part][3, group] = broken
    y = packed_blocks(extension, q, scale, offset, form).multiply(x, may_be_wide)
    assert not y[:, 3].isfinite().any()
    y[:, 3] = expected[:, 3]
    assert torch.equal(y, expected)


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_widening_moves_no_group_of_weights_as_a_whole(extension, least_wide_rows, form) -> None:
    """Inputs alike: what is left of the weights' errors is their mean, and it is near none."""
    q, scale, _ = blocks(256, 192, form)
    middle = 8 if form == "int4" else 128
    scale = ((0.5 + torch.rand(scale.shape, generator=torch.Generator().manual_seed(10))) / middle).half()
    offset = -middle * scale
    linear = packed_blocks(extension, q, scale, offset, form)
    x = torch.ones(least_wide_rows, 192)
    errors = linear.multiply(x, may_be_wide=True)[0].double() - unpacked(linear, 256).double().sum(1)
    wide_scales = middle * scale.double().amax(1) / 126
    assert (errors / wide_scales / 192**0.5).std() < 0.35  # 0.29 is each weight rounded on its own, and no more


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("may_be_wide", [False, True])
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_an_input_that_is_no_number_leaves_none_in_its_row_and_no_other(
    extension, least_wide_rows, form, may_be_wide, broken
) -> None:
    linear = packed_blocks(extension, *blocks(32, 224, form), form)
    x = torch.randn(least_wide_rows, 224, generator=torch.Generator().manual_seed(9))
    expected = linear.multiply(x, may_be_wide)
    x[5, 100] = broken
    y = linear.multiply(x, may_be_wide)
    assert y[5].isnan().all()
    y[5] = expected[5]
    assert torch.equal(y, expected)


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("weight_size", [2.0**-24, 1.0, 4000.0])
@pytest.mark.parametrize("input_size", [1e-36, 1e-20, 1.0, 1e20])
def test_huge_and_tiny_values_stay_finite_and_as_exact(
    extension, least_wide_rows, form, weight_size, input_size
) -> None:
    q, scale, offset = blocks(16, 384, form)
    scale, offset = (scale.float() * weight_size).half(), (offset.float() * weight_size).half()
    linear = packed_blocks(extension, q, scale, offset, form)
    x = input_size * torch.randn(least_wide_rows, 384, generator=torch.Generator().manual_seed(8))
    y = linear.multiply(x, may_be_wide=True).double()
    exact = x.double() @ unpacked(linear, 16).double().T
    # Inputs below 1e-35 count as zeros.
    bound = wide_bound(x, q, scale, offset, form) + 1e-5 * exact.abs().max() + 1e-35 * 384 * 16 * weight_size
    assert y.isfinite().all()
    assert ((y - exact).abs() <= bound).all()


def test_an_input_row_of_zeros_gives_the_bias_in_a_wide_product(extension, least_wide_rows) -> None:
    bias = torch.arange(16.0)
    for form in ("int8", "int4"):
        linear = packed(extension, torch.randn(16, 224), form, bias)
        x = torch.randn(least_wide_rows, 224)
        x[3] = 0
        assert torch.equal(linear.multiply(x, may_be_wide=True)[3], bias)


@pytest.mark.parametrize("form", ["float32", "bf16"])
def test_weights_that_are_not_quantized_see_no_wide_products(extension, least_wide_rows, form) -> None:
    linear = packed(extension, torch.randn(32, 224), form)
    x = torch.randn(least_wide_rows, 224)
    assert torch.equal(linear.multiply(x, may_be_wide=True), linear.multiply(x))
