"""SwiGLU's middle at a Llama-8B's size: bytes moved beside a copy's.

python -P -m pagedd.bench.kernels.silu_and_mul --output FILE
"""

from functools import partial

import torch

from pagedd.bench.kernels.card import report, row
from pagedd.bench.report import Cell
from pagedd.kernels.triton.silu_and_mul import silu_and_mul

SIZE = 14336


def measure(device: torch.device, copied: float) -> list[dict[str, Cell]]:
    rows = []
    for num_rows in (1, 64, 2048):
        x = torch.randn(num_rows, 2 * SIZE, device=device).bfloat16()
        rows.append(row(f"{num_rows} rows", partial(silu_and_mul, x), device, x.nbytes * 3 // 2, copied))
    return rows


def main(argv: list[str] | None = None) -> None:
    report("kernels.silu_and_mul", measure, argv)


if __name__ == "__main__":
    main()
