"""RMSNorm, and RMSNorm of a sum (Zhang and Sennrich 2019), each one pass over the rows.

    y = x / sqrt(mean(x²) + eps) · weight

Moves 2 numbers an element: x in, y out. With a residual 4: both in, sum and y out; apart they would be 5. The sum is
rounded to its dtype before it is normalised, so that it is the same number that the next layer adds to. `weight` is
read by every program and stays in the caches.

A program owns whole rows, so nothing is read twice and no second pass is needed; short rows (a head's, of query and key
norms) share a program.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from pagedd.kernels.errors import UnfitError
from pagedd.kernels.triton.card import card_of
from pagedd.kernels.triton.launch import Launch, launch_for
from pagedd.kernels.triton.variant import TRITON_TYPES, Variant

LONGEST_ROW = 32_768  # numbers in a row: more do not fit a program's registers


# What differs from step to step must not make a kernel of its own each.
@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x_ptr,  # [outer, inner, size], strides as given
    residual_ptr,  # [outer × inner, size], contiguous; read if HAS_RESIDUAL
    weight_ptr,  # [size]
    y_ptr,  # [outer × inner, size], contiguous
    total_ptr,  # [outer × inner, size], contiguous; written if HAS_RESIDUAL
    num_rows,
    inner,
    outer_stride,
    inner_stride,
    size,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,  # of a program
    COLUMNS: tl.constexpr,  # power of two, at least size
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    is_inside = (row < num_rows)[:, None] & (column < size)[None, :]
    start = row // inner * outer_stride + row % inner * inner_stride
    place = row[:, None] * size + column[None, :]
    x = tl.load(x_ptr + start[:, None] + column[None, :], mask=is_inside, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + place, mask=is_inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(total_ptr + place, x, mask=is_inside)
    wide = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=1) / size + eps)
    weight = tl.load(weight_ptr + column, mask=column < size, other=0.0).to(tl.float32)
    y = wide * inverse[:, None] * weight[None, :]
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=is_inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension.

    Args:
        x: [..., size], any float dtype, rows contiguous; a view into wider rows is read where it lies if it has at most
            three dimensions. The result has its shape and dtype.
        weight: [size].

    Raises:
        UnfitError: a row has more than 32768 numbers.
    """
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, y, None, eps)
    return y


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual), both new. Shapes and errors as in `rms_norm`."""
    y, total = torch.empty((2, *x.shape), dtype=x.dtype, device=x.device).unbind(0)
    _launch(x, residual.contiguous(), weight, y, total, eps)
    return y, total


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    y: torch.Tensor,
    total: torch.Tensor | None,
    eps: float,
) -> None:
    size = x.shape[-1]
    if size > LONGEST_ROW:
        raise UnfitError(f"rms_norm of rows of {size} numbers; at most {LONGEST_ROW} fit a program")
    rows = x if x.ndim == 3 else x.reshape(-1, 1, size)
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    num_rows = rows.shape[0] * rows.shape[1]
    if num_rows == 0:
        return
    launch = launch_for("rms_norm", card_of(x.device).arch, size=size)
    constants = _constants(launch, size, has_residual=residual is not None)
    _rms_norm_kernel[(triton.cdiv(num_rows, constants["ROWS"]),)](
        rows,
        x if residual is None else residual,
        weight,
        y,
        y if total is None else total,
        num_rows,
        rows.shape[1],
        rows.stride(0),
        rows.stride(1),
        size,
        eps,
        **constants,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )


def _constants(launch: Launch, size: int, *, has_residual: bool) -> dict[str, Any]:
    columns = triton.next_power_of_2(size)
    return {"HAS_RESIDUAL": has_residual, "ROWS": max(1, launch.tiles["numbers"] // columns), "COLUMNS": columns}


def variants(arch: int) -> list[Variant]:
    """Hidden size and head size of a Llama-8B, and a wide and an odd row."""
    return [
        _variant(arch, size, has_residual=has_residual, dtype=dtype)
        for dtype in (torch.bfloat16, torch.float16)
        for size, has_residual in ((4096, False), (4096, True), (128, False), (576, True), (16384, True))
    ]


def _variant(arch: int, size: int, *, has_residual: bool, dtype: torch.dtype) -> Variant:
    launch = launch_for("rms_norm", arch, size=size)
    constants = _constants(launch, size, has_residual=has_residual)
    kind = TRITON_TYPES[dtype]
    pointers = ("x_ptr", "residual_ptr", "weight_ptr", "y_ptr", "total_ptr")
    strides = ("outer_stride", "inner_stride", "size")
    return Variant(
        name=f"rms_norm.{'add.' if has_residual else ''}{kind}.{size}",
        kernel=_rms_norm_kernel,
        signature=dict.fromkeys(pointers, f"*{kind}")
        | dict.fromkeys(("num_rows", "inner", *strides), "i32")
        | {"eps": "fp32"},
        constants=constants,
        aligned=frozenset((*pointers, *strides)),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        must_fit=size in (4096, 128),
    )
