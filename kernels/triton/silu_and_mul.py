"""SwiGLU's middle (Shazeer 2020): silu of one half of a row times the other.

    y = gate / (1 + exp(−gate)) · up

Moves 3 numbers for each one of the result: gate and up in, y out. One rounding, at the end.
"""

import torch
import triton
import triton.language as tl

from pagedd.kernels.triton.card import card_of
from pagedd.kernels.triton.launch import launch_for
from pagedd.kernels.triton.variant import TRITON_TYPES, Variant


@triton.jit
def _silu_and_mul_kernel(
    x_ptr,  # [num_rows, 2 × size]: gate, then up; contiguous
    y_ptr,  # [num_rows, size], contiguous
    size,
    COLUMNS: tl.constexpr,  # of a program
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_inside = column < size
    gate_ptr = x_ptr + row * 2 * size
    gate = tl.load(gate_ptr + column, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + size + column, mask=is_inside, other=0.0).to(tl.float32)
    y = gate / (1 + tl.exp(-gate)) * up
    tl.store(y_ptr + row * size + column, y.to(y_ptr.dtype.element_ty), mask=is_inside)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up.

    Args:
        x: [..., 2 × size], any float dtype: gate, then up; copied first if it is not contiguous.

    Returns:
        [..., size] in the dtype of `x`.
    """
    size = x.shape[-1] // 2
    y = torch.empty((*x.shape[:-1], size), dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    launch = launch_for("silu_and_mul", card_of(x.device).arch)
    columns = launch.tiles["columns"]
    _silu_and_mul_kernel[(y.numel() // size, triton.cdiv(size, columns))](
        x.contiguous(), y, size, COLUMNS=columns, num_warps=launch.num_warps, num_stages=launch.num_stages
    )
    return y


def variants(arch: int) -> list[Variant]:
    launch = launch_for("silu_and_mul", arch)
    return [
        Variant(
            name=f"silu_and_mul.{TRITON_TYPES[dtype]}",
            kernel=_silu_and_mul_kernel,
            signature={"x_ptr": f"*{TRITON_TYPES[dtype]}", "y_ptr": f"*{TRITON_TYPES[dtype]}", "size": "i32"},
            constants={"COLUMNS": launch.tiles["columns"]},
            aligned=frozenset({"x_ptr", "y_ptr", "size"}),
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
            must_fit=True,
        )
        for dtype in (torch.bfloat16, torch.float16)
    ]
