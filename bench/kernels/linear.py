"""Products with a Llama-8B's weights in 4 and 8 bits: bytes of the weight beside a copy's, and operations.

python -P -m pagedd.bench.kernels.linear --output FILE
"""

from functools import partial

import torch

from pagedd.bench.kernels.card import report, row
from pagedd.bench.report import Cell
from pagedd.kernels.packed_weight import PackedWeight, pack_weight
from pagedd.kernels.triton.linear import packed_linear

# (out_features, in_features) of query, key and value together, of gate and up together, and of down.
SHAPES = ((6144, 4096), (28672, 4096), (4096, 14336))
ROW_COUNTS = (1, 2, 8, 16, 64, 256, 2048)


def measure(device: torch.device, copied: float) -> list[dict[str, Cell]]:
    rows = []
    for bits in (4, 8):
        for out_features, in_features in SHAPES:
            weight = make_weight(out_features, in_features, bits, device)
            for num_rows in ROW_COUNTS:
                x = torch.randn(num_rows, in_features, device=device).bfloat16()
                num_bytes = weight.num_bytes + x.nbytes + 2 * num_rows * out_features
                case = f"int{bits}, {in_features} to {out_features}, {num_rows} rows"
                num_operations = 2 * num_rows * out_features * in_features
                rows.append(
                    row(case, partial(packed_linear, x, weight, None), device, num_bytes, copied, num_operations)
                )
    return rows


def make_weight(out_features: int, in_features: int, bits: int, device: torch.device) -> PackedWeight:
    q = torch.randint(0, 2**bits, (out_features, in_features), dtype=torch.uint8, device=device)
    scale = torch.rand(out_features, in_features // 32, device=device).half() / 2**bits
    return pack_weight(q, scale, -scale * 2 ** (bits - 1), bits)


def main(argv: list[str] | None = None) -> None:
    report("kernels.linear", measure, argv)


if __name__ == "__main__":
    main()
