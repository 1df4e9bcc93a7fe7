"""RMSNorm of a Llama-8B's rows, alone and with a residual: bytes moved beside a copy's.

python -P -m pagedd.bench.kernels.rms_norm --output FILE
"""

from functools import partial

import torch

from pagedd.bench.kernels.card import report, row
from pagedd.bench.report import Cell
from pagedd.kernels.triton.rms_norm import add_rms_norm, rms_norm

SIZE = 4096


def measure(device: torch.device, copied: float) -> list[dict[str, Cell]]:
    weight = torch.ones(SIZE, dtype=torch.bfloat16, device=device)
    rows = []
    for num_rows in (1, 64, 2048):
        x = torch.randn(num_rows, SIZE, device=device).bfloat16()
        rows += [
            row(f"rms_norm, {num_rows} rows", partial(rms_norm, x, weight, 1e-5), device, 2 * x.nbytes, copied),
            row(
                f"add_rms_norm, {num_rows} rows",
                partial(add_rms_norm, x, x, weight, 1e-5),
                device,
                4 * x.nbytes,
                copied,
            ),
        ]
    return rows


def main(argv: list[str] | None = None) -> None:
    report("kernels.rms_norm", measure, argv)


if __name__ == "__main__":
    main()
