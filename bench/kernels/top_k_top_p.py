"""Top-k and top-p over a Llama-3's vocabulary: time, and what one pass over logits and weights would move.

    python -P -m pagedd.bench.kernels.top_k_top_p --output FILE

Each launch begins with a copy of fresh weights, as it sets those of dropped tokens to 0; the copy counts as well.
"""

from functools import partial

import torch

from pagedd.bench.kernels.card import report, row
from pagedd.bench.report import Cell
from pagedd.kernels.triton.top_k_top_p import keep_best

VOCAB_SIZE = 128_256
ROW_COUNTS = (1, 64, 256)


def measure(device: torch.device, copied: float) -> list[dict[str, Cell]]:
    rows = []
    for limit, share in ((50, 1.0), (VOCAB_SIZE, 0.9), (50, 0.9)):
        for num_rows in ROW_COUNTS:
            logits = torch.randn(num_rows, VOCAB_SIZE, device=device) * 3
            relative = logits - logits.amax(dim=1, keepdim=True)
            weights = (relative.exp() * 2**40).long()
            limits = torch.full((num_rows,), limit, device=device)
            shares = torch.full((num_rows,), share, dtype=torch.float64, device=device)
            launch = partial(keep_best_of_copy, logits, weights, torch.empty_like(weights), limits, shares)
            case = f"top_k {limit}, top_p {share}, {num_rows} rows"
            num_bytes = logits.nbytes + 3 * weights.nbytes
            rows.append(row(case, launch, device, num_bytes, copied))
    return rows


def keep_best_of_copy(
    logits: torch.Tensor, fresh: torch.Tensor, weights: torch.Tensor, limits: torch.Tensor, shares: torch.Tensor
) -> None:
    weights.copy_(fresh)
    keep_best(logits, weights, limits, shares)


def main(argv: list[str] | None = None) -> None:
    report("kernels.top_k_top_p", measure, argv)


if __name__ == "__main__":
    main()
