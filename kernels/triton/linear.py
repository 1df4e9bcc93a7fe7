"""Products with weights of 4 or 8 bits: y = x · weightᵀ + bias, the weight dequantized in registers.

Moves in_features · out_features · (bits + 1) / 8 bytes of weight, scales included (nested ones take 5/8 or 9/8 of a bit
instead of 1), x once and y once: up to a few dozen rows the weight is all that matters, and the time is its bytes over
the bandwidth. Beyond that it is 2 · rows · in_features · out_features operations.

* *vector*, up to 2 rows: products and sums on the ordinary units, in float32. A number takes about 6 instructions, of
  which each row has its own share.
* *matrix*, more rows: numbers become the dtype of x in registers, again for about 6 instructions, and go to the matrix
  units, which multiply up to 16 rows at once and sum in float32.

Numbers are extracted into the highest bits of a float32's mantissa, where q reads as 1 + q / 2^bits, and the scale and
offset are adjusted to that. It spares a conversion for each number, and those run at a quarter of the speed or less.

Where the result has too few tiles to occupy the card, in_features is split among programs. Their partial sums go to a
workspace, and a second kernel adds them up in their order, so that the sum is the same in every run.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from pagedd.kernels.packed_weight import PackedWeight
from pagedd.kernels.triton.card import Card, card_of
from pagedd.kernels.triton.launch import Launch, launch_for
from pagedd.kernels.triton.products import dot
from pagedd.kernels.triton.variant import TRITON_TYPES, Variant

VECTOR_ROWS = 2  # up to so many, see above


@triton.jit
def _load_inputs(x_ptr, row, row_is_inside, x_stride, step, num_groups, INPUTS: tl.constexpr):
    """[ROWS, INPUTS] of a step; 0 past the rows and inputs that there are."""
    place = step * INPUTS + tl.arange(0, INPUTS)
    is_inside = row_is_inside[:, None] & (place < num_groups * 32)[None, :]
    return tl.load(x_ptr + row[:, None] * x_stride + place[None, :], mask=is_inside, other=0.0)


@triton.jit
def _load_words(words_ptr, out, out_is_inside, step, num_groups, BITS: tl.constexpr, GROUPS: tl.constexpr):
    """[OUTS, GROUPS × BITS] of a step."""
    word = step * (GROUPS * BITS) + tl.arange(0, GROUPS * BITS)
    is_inside = out_is_inside[:, None] & (word < num_groups * BITS)[None, :]
    return tl.load(words_ptr + out[:, None] * (num_groups * BITS) + word[None, :], mask=is_inside, other=0)


@triton.jit
def _load_scales(
    scales_ptr, factors_ptr, out, out_is_inside, group, num_groups, BITS: tl.constexpr, NESTED_GROUP: tl.constexpr
):
    """Step and origin of numbers that read as 1 + q / 2^BITS: weight = step · number + origin. [OUTS, N] float32."""
    if NESTED_GROUP == 0:
        is_inside = out_is_inside[:, None] & (group < num_groups)[None, :]
        pair = tl.load(scales_ptr + out[:, None] * num_groups + group[None, :], mask=is_inside, other=0)
        scale, offset = _halves(pair)
    else:
        # A word has the scales of two groups: what is shorter than 4 bytes cannot be copied ahead of the loop.
        is_inside = out_is_inside[:, None] & (group < num_groups * (32 // NESTED_GROUP))[None, :]
        place = out[:, None] * (num_groups * 16 // NESTED_GROUP) + (group // 2)[None, :]
        pair = tl.load(scales_ptr + place, mask=is_inside, other=0) >> (group % 2 * 16)[None, :]
        place = out[:, None] * (num_groups // 8) + (group * NESTED_GROUP // 256)[None, :]
        d, m = _halves(tl.load(factors_ptr + place, mask=is_inside, other=0))
        scale = d * (pair << 24 >> 24).to(tl.float32)
        offset = -m * (pair << 16 >> 24).to(tl.float32)
    step = scale * (1 << BITS)
    return step, offset - step


@triton.jit
def _halves(words):
    """Two float16 of a word, the lower one first, as float32."""
    low = (words & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    high = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def _numbers(words, BITS: tl.constexpr):
    """[OUTS, WORDS] → [OUTS, WORDS // 4, LANES, 4] float32 of 1 + q / 2^BITS: their bits top the mantissa."""
    LANES: tl.constexpr = 32 // BITS
    TOP: tl.constexpr = 23 - BITS
    MASK: tl.constexpr = ((1 << BITS) - 1) << TOP
    units = tl.reshape(words, [words.shape[0], words.shape[1] // 4, 1, 4])
    shift = tl.arange(0, LANES)[None, None, :, None] * BITS
    in_place = tl.where(shift < TOP, units << (TOP - shift), units >> (shift - TOP))
    return (in_place & MASK | 0x3F800000).to(tl.float32, bitcast=True)


# What differs from step to step must not make a kernel of its own each.
@triton.jit(do_not_specialize=["num_rows", "steps_per_split"])
def _vector_kernel(
    x_ptr,  # [num_rows, in_features]
    words_ptr,  # [out_features, num_groups × BITS]
    scales_ptr,  # [out_features, num_groups], or nested
    factors_ptr,  # [out_features, num_groups / 8]; read if nested
    bias_ptr,  # [out_features]; read if HAS_BIAS
    y_ptr,  # [splits, num_rows, out_features]
    num_rows,
    out_features,
    num_groups,
    x_stride,
    steps_per_split,
    BITS: tl.constexpr,
    NESTED_GROUP: tl.constexpr,  # numbers with one nested scale; 0: scales are plain
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,  # power of two, at least num_rows
    OUTS: tl.constexpr,  # of a program
    GROUPS: tl.constexpr,  # of a step
    STAGES: tl.constexpr,  # steps whose loads are under way at once
):
    UNIT: tl.constexpr = 4 * 32 // BITS  # numbers of a unit
    INPUTS: tl.constexpr = GROUPS * 32
    UNITS: tl.constexpr = INPUTS // UNIT
    row = tl.arange(0, ROWS)
    out = tl.program_id(0).to(tl.int64) * OUTS + tl.arange(0, OUTS)
    row_is_inside, out_is_inside = row < num_rows, out < out_features
    first_step = tl.program_id(1) * steps_per_split
    end_step = tl.minimum(first_step + steps_per_split, tl.cdiv(num_groups, GROUPS))
    sums = tl.zeros([ROWS, OUTS, UNITS], dtype=tl.float32)
    for step in tl.range(first_step, end_step, num_stages=STAGES):
        x = _load_inputs(x_ptr, row, row_is_inside, x_stride, step, num_groups, INPUTS)
        words = _load_words(words_ptr, out, out_is_inside, step, num_groups, BITS, GROUPS)
        group = (step * UNITS + tl.arange(0, UNITS)) * UNIT // (NESTED_GROUP or 32)
        scale, origin = _load_scales(scales_ptr, factors_ptr, out, out_is_inside, group, num_groups, BITS, NESTED_GROUP)
        # With the units last, which neighbouring threads share out: a unit's numbers are one thread's, and their sum.
        inputs = tl.permute(tl.reshape(x.to(tl.float32), [ROWS, UNITS, UNIT]), [2, 0, 1])
        numbers = tl.permute(tl.reshape(_numbers(words, BITS), [OUTS, UNITS, UNIT]), [2, 0, 1])
        products = tl.sum(inputs[:, :, None, :] * numbers[:, None, :, :], axis=0)
        sums += scale[None, :, :] * products + origin[None, :, :] * tl.sum(inputs, axis=0)[:, None, :]
    y = tl.sum(sums, axis=2)
    if HAS_BIAS:
        y += tl.load(bias_ptr + out, mask=out_is_inside, other=0.0).to(tl.float32)[None, :]
    place = (tl.program_id(1).to(tl.int64) * num_rows + row)[:, None] * out_features + out[None, :]
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=(row < num_rows)[:, None] & out_is_inside[None, :])


@triton.jit(do_not_specialize=["num_rows", "steps_per_split"])
def _matrix_kernel(
    x_ptr,  # [num_rows, in_features]
    words_ptr,  # [out_features, num_groups × BITS]
    scales_ptr,  # [out_features, num_groups], or nested
    factors_ptr,  # [out_features, num_groups / 8]; read if nested
    bias_ptr,  # [out_features]; read if HAS_BIAS
    y_ptr,  # [splits, num_rows, out_features]
    num_rows,
    out_features,
    num_groups,
    x_stride,
    steps_per_split,
    BITS: tl.constexpr,
    NESTED_GROUP: tl.constexpr,  # numbers with one nested scale; 0: scales are plain
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,  # of a program
    OUTS: tl.constexpr,  # of a program
    GROUPS: tl.constexpr,  # of a step
    STAGES: tl.constexpr,  # steps whose loads are under way at once
):
    INPUTS: tl.constexpr = GROUPS * 32
    SCALES: tl.constexpr = INPUTS // (NESTED_GROUP or 32)  # of a step and out
    num_row_tiles = tl.cdiv(num_rows, ROWS)
    # Neighbours take the same weights, so that those come from memory once.
    row = (tl.program_id(0) % num_row_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    out = (tl.program_id(0) // num_row_tiles).to(tl.int64) * OUTS + tl.arange(0, OUTS)
    row_is_inside, out_is_inside = row < num_rows, out < out_features
    first_step = tl.program_id(1) * steps_per_split
    end_step = tl.minimum(first_step + steps_per_split, tl.cdiv(num_groups, GROUPS))
    y = tl.zeros([ROWS, OUTS], dtype=tl.float32)
    for step in tl.range(first_step, end_step, num_stages=STAGES):
        x = _load_inputs(x_ptr, row, row_is_inside, x_stride, step, num_groups, INPUTS)
        words = _load_words(words_ptr, out, out_is_inside, step, num_groups, BITS, GROUPS)
        group = step * SCALES + tl.arange(0, SCALES)
        scale, origin = _load_scales(scales_ptr, factors_ptr, out, out_is_inside, group, num_groups, BITS, NESTED_GROUP)
        numbers = tl.reshape(_numbers(words, BITS), [OUTS, SCALES, INPUTS // SCALES])
        weights = tl.reshape((numbers * scale[:, :, None] + origin[:, :, None]).to(x.dtype), [OUTS, INPUTS])
        y = dot(x, tl.trans(weights), y)
    if HAS_BIAS:
        y += tl.load(bias_ptr + out, mask=out_is_inside, other=0.0).to(tl.float32)[None, :]
    place = (tl.program_id(1).to(tl.int64) * num_rows + row)[:, None] * out_features + out[None, :]
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=row_is_inside[:, None] & out_is_inside[None, :])


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def _sum_splits_kernel(
    partial_ptr,  # [splits, num_rows × out_features] float32
    bias_ptr,  # [out_features]; read if HAS_BIAS
    y_ptr,  # [num_rows × out_features]
    num_rows,
    out_features,
    num_splits,
    HAS_BIAS: tl.constexpr,
    COLUMNS: tl.constexpr,  # of a program
):
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    size = num_rows.to(tl.int64) * out_features
    is_inside = column < size
    y = tl.zeros([COLUMNS], dtype=tl.float32)
    place = column
    for _ in range(num_splits):
        y += tl.load(partial_ptr + place, mask=is_inside, other=0.0)
        place += size
    if HAS_BIAS:
        y += tl.load(bias_ptr + column % out_features, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + column, y.to(y_ptr.dtype.element_ty), mask=is_inside)


def packed_linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """x · weightᵀ + bias.

    Args:
        x: [num_rows, in_features], bfloat16, float16 or float32; the numbers of a row lie together.
        bias: [out_features], any float dtype.

    Returns:
        [num_rows, out_features] in the dtype of `x`.
    """
    num_rows = x.shape[0]
    y = torch.empty((num_rows, weight.out_features), dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return y
    card = card_of(x.device)
    nested_group = 0 if weight.factors is None else weight.group
    kernel, launch, constants = _choose(card.arch, weight.bits, nested_group, num_rows)
    num_tiles = triton.cdiv(weight.out_features, constants["OUTS"]) * triton.cdiv(num_rows, constants["ROWS"])
    num_groups = weight.in_features // 32
    num_steps = triton.cdiv(num_groups, constants["GROUPS"])
    steps_per_split = _steps_per_split(card, launch, num_tiles, num_steps)
    num_splits = triton.cdiv(num_steps, steps_per_split)
    is_split = num_splits > 1
    # The workspace: what it takes is num_splits times the result, of which there is little, or it would not be split.
    target = torch.empty((num_splits, *y.shape), dtype=torch.float32, device=x.device) if is_split else y
    kernel[(num_tiles, num_splits)](
        x,
        weight.words,
        weight.scales,
        weight.scales if weight.factors is None else weight.factors,
        weight.scales if bias is None else bias,
        target,
        num_rows,
        weight.out_features,
        num_groups,
        x.stride(0),
        steps_per_split,
        HAS_BIAS=bias is not None and not is_split,
        **constants,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    if is_split:
        _sum_splits(target, bias, y)
    return y


def _choose(arch: int, bits: int, nested_group: int, num_rows: int) -> tuple[Any, Launch, dict[str, int]]:
    """Kernel, launch and constants for so many rows."""
    is_vector = num_rows <= VECTOR_ROWS
    name = "linear.vector" if is_vector else "linear.matrix"
    launch = launch_for(name, arch, rows=num_rows, is_nested=int(nested_group > 0))
    rows = triton.next_power_of_2(num_rows) if is_vector else launch.tiles["rows"]
    constants = {
        "BITS": bits,
        "NESTED_GROUP": nested_group,
        "ROWS": rows,
        "OUTS": launch.tiles["outs"],
        "GROUPS": launch.tiles["groups"],
    }
    constants["STAGES"] = launch.num_stages
    return _vector_kernel if is_vector else _matrix_kernel, launch, constants


def _steps_per_split(card: Card, launch: Launch, num_tiles: int, num_steps: int) -> int:
    """As few splits as give each processor its programs, none with fewer steps than the launch asks for."""
    wanted = launch.tiles["programs"] * card.num_processors
    num_splits = max(1, min(triton.cdiv(wanted, num_tiles), num_steps // launch.tiles["steps"]))
    return int(triton.cdiv(num_steps, num_splits))


def _sum_splits(partial: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor) -> None:
    launch = launch_for("linear.sum_splits", card_of(y.device).arch)
    columns = launch.tiles["columns"]
    _sum_splits_kernel[(triton.cdiv(y.numel(), columns),)](
        partial,
        partial if bias is None else bias,
        y,
        y.shape[0],
        y.shape[1],
        partial.shape[0],
        HAS_BIAS=bias is not None,
        COLUMNS=columns,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )


# Form of the weights → bits, and numbers with one nested scale.
_FORMS = {"int4": (4, 0), "int8": (8, 0), "q4_k": (4, 32), "q5_k": (8, 32), "q6_k": (8, 16)}


def variants(arch: int) -> list[Variant]:
    """Every row of the launch table, in both dtypes and all forms; whole and split, and two forms with a bias."""
    dtypes = (torch.bfloat16, torch.float16)
    return [
        *(
            _variant(arch, dtype, form, num_rows, is_split=is_split, has_bias=has_bias)
            for dtype in dtypes
            for form in _FORMS
            for num_rows in (1, 2, 16, 64, 2048)
            for is_split, has_bias in ((False, False), (True, False), (False, True))
            if not has_bias or form in ("int4", "q4_k")
        ),
        *(_sum_variant(arch, dtype, has_bias=has_bias) for dtype in dtypes for has_bias in (False, True)),
    ]


def _variant(arch: int, dtype: torch.dtype, form: str, num_rows: int, *, is_split: bool, has_bias: bool) -> Variant:
    kernel, launch, constants = _choose(arch, *_FORMS[form], num_rows)
    kind = TRITON_TYPES[dtype]
    sizes = ("num_rows", "out_features", "num_groups", "x_stride", "steps_per_split")
    pointers = ("x_ptr", "words_ptr", "scales_ptr", "factors_ptr", "bias_ptr", "y_ptr")
    ending = f"{'.split' if is_split else ''}{'.bias' if has_bias else ''}"
    return Variant(
        name=f"linear.{kind}.{form}.{num_rows}{ending}",
        kernel=kernel,
        signature={"x_ptr": f"*{kind}", "bias_ptr": f"*{kind}", "y_ptr": "*fp32" if is_split else f"*{kind}"}
        | dict.fromkeys(("words_ptr", "scales_ptr", "factors_ptr"), "*i32")
        | dict.fromkeys(sizes, "i32"),
        constants=constants | {"HAS_BIAS": has_bias},
        aligned=frozenset((*pointers, "out_features", "num_groups", "x_stride")),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        must_fit=True,
        has_products=kernel is _matrix_kernel,
    )


def _sum_variant(arch: int, dtype: torch.dtype, *, has_bias: bool) -> Variant:
    launch = launch_for("linear.sum_splits", arch)
    kind = TRITON_TYPES[dtype]
    return Variant(
        name=f"linear.sum_splits.{kind}{'.bias' if has_bias else ''}",
        kernel=_sum_splits_kernel,
        signature={"partial_ptr": "*fp32", "bias_ptr": f"*{kind}", "y_ptr": f"*{kind}"}
        | dict.fromkeys(("num_rows", "out_features", "num_splits"), "i32"),
        constants={"HAS_BIAS": has_bias, "COLUMNS": launch.tiles["columns"]},
        aligned=frozenset({"partial_ptr", "bias_ptr", "y_ptr", "out_features"}),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        must_fit=True,
    )
