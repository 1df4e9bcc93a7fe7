"""Rope and the writing of keys and values at a Llama-8B's size, in each form of the cache: bytes beside a copy's.

python -P -m pagedd.bench.kernels.rope_kv --output FILE
"""

from functools import partial

import torch

from pagedd.bench.kernels.card import report, row
from pagedd.bench.report import Cell
from pagedd.kernels.kv_form import FORMS, KVForm
from pagedd.kernels.layout import KVLayer, QuantizedLayer
from pagedd.kernels.triton.rope_kv import rope_and_write_kv

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
TOKEN_COUNTS = (1, 64, 2048)


def measure(device: torch.device, copied: float) -> list[dict[str, Cell]]:
    rows = []
    for name in ("bf16", "fp8", "int8", "k8v4", "int4"):
        for num_tokens in TOKEN_COUNTS:
            form = FORMS[name]
            kv_layer = make_layer(form, -(-num_tokens // BLOCK_SIZE), device)
            heads = torch.randn(num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM, device=device).bfloat16()
            query, key, value = torch.split(heads, [NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
            cos = torch.randn(num_tokens, HEAD_DIM // 2, device=device)
            slots = torch.arange(num_tokens, device=device)
            arguments = (query, key, value, cos, cos, kv_layer, slots, slots)
            # A head's key and value; an open key is written to its page.
            key_bytes = form.page_bytes(1, HEAD_DIM) or form.record_bytes(0, BLOCK_SIZE, HEAD_DIM) // BLOCK_SIZE
            cached = key_bytes + form.record_bytes(1, BLOCK_SIZE, HEAD_DIM) // BLOCK_SIZE
            written = num_tokens * (NUM_HEADS * HEAD_DIM * 2 + NUM_KV_HEADS * cached)
            num_bytes = heads.nbytes + written + 2 * cos.nbytes
            case = f"{name}, {num_tokens} tokens"
            rows.append(row(case, partial(rope_and_write_kv, *arguments), device, num_bytes, copied))
    return rows


def make_layer(form: KVForm, num_blocks: int, device: torch.device) -> KVLayer:
    if form.dtype is not None:
        return torch.zeros(2, num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype=form.dtype, device=device)
    return QuantizedLayer.filled(
        form, num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, device=device, num_pages=num_blocks
    )


def main(argv: list[str] | None = None) -> None:
    report("kernels.rope_kv", measure, argv)


if __name__ == "__main__":
    main()
