"""Attention over the paged cache on this machine's card, with the heads of a Llama 8B. Needs a GPU.

    python -P -m pagedd.bench.kernels.paged_attention --forms bf16,int8 --output FILE

    ms            median time of one layer's attention, with a cold L2 cache
    GB/s          bytes of keys and values that it has to read, over the time
    of copy       the same, over what a copy of 1 GiB reads and writes on this card
    TFLOP/s       operations on the pairs of row and key that see each other, over the time
    of product    the same, over a bf16 product of 8192 × 8192 × 8192 on this card

Decodes are bound by bytes, chunks by operations. Blocks lie scattered over the pool, as they do after a day's serving.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch

from pagedd.bench.kernels.card import copy_rate, product_rate, seconds_of, this_card
from pagedd.bench.report import Cell, print_report
from pagedd.kernels.layout import KVLayer, QuantizedLayer
from pagedd.kernels.triton.attention_shape import AttentionShape, llama_8b
from pagedd.kernels.triton.paged_attention import paged_attention

LLAMA_8B = llama_8b(arch=80)  # in bfloat16

# Query rows and context of each sequence.
CASES = {
    "decode 1 × 4096": [(1, 4096)],
    "decode 1 × 65536": [(1, 65_536)],
    "decode 8 × 4096": [(1, 4096)] * 8,
    "decode 64 × 4096": [(1, 4096)] * 64,
    "decode 64 × 128 … 8192": [(1, 128 * (i + 1)) for i in range(64)],
    "decode 256 × 1024": [(1, 1024)] * 256,
    "prompt 4096": [(4096, 4096)],
    "chunk 1024 of 16384": [(1024, 16_384)],
    "decode 32 × 2048, chunk 2048": [(1, 2048)] * 32 + [(2048, 2048)],
}


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Satisfies `kernels.layout.PagedBatch`."""

    query_starts: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    max_query_len: int
    max_context_len: int
    num_decodes: int
    open_slots: torch.Tensor
    open_tables: torch.Tensor


def make_batch(lens: list[tuple[int, int]], block_size: int) -> tuple[Batch, int]:
    """The batch, and the blocks that its pool has to have."""
    query_lens, contexts = [q for q, _ in lens], [c for _, c in lens]
    width = -(-max(contexts) // block_size)
    num_blocks = width * len(lens)
    batch = Batch(
        query_starts=torch.tensor([0, *query_lens], device="cuda").cumsum(0).int(),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device="cuda"),
        block_tables=torch.randperm(num_blocks, device="cuda").int().view(len(lens), width),
        slot_mapping=torch.empty(0, dtype=torch.int64, device="cuda"),
        max_query_len=max(query_lens),
        max_context_len=max(contexts),
        num_decodes=query_lens.count(1),
        open_slots=torch.empty(0, dtype=torch.int64, device="cuda"),
        open_tables=torch.arange(width, device="cuda").int().expand(len(lens), width),
    )
    return batch, num_blocks


def make_layer(shape: AttentionShape, num_blocks: int) -> KVLayer:
    """Random numbers: a card draws more power, and runs slower, on them than on zeros."""
    form = shape.form
    if form.dtype is not None:
        size = (2, num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)
        return torch.randn(size, device="cuda", dtype=form.dtype)
    device = torch.device("cuda")
    sizes = (num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)
    layer = QuantizedLayer.filled(form, *sizes, device=device, num_pages=num_blocks)
    layer.open_keys.normal_()
    for plane in range(2):
        layer.values(plane).random_(0, 256)
        layer.scales(plane).view(torch.int16).fill_(0x3C80)  # 2⁻⁶ as bfloat16
    return layer


def measure(case: str, shape: AttentionShape, copy_rate: float, product_rate: float) -> dict[str, Cell]:
    """One row of the table. Rates in bytes and operations a second."""
    lens = CASES[case]
    batch, num_blocks = make_batch(lens, shape.block_size)
    layer = make_layer(shape, num_blocks)
    query = torch.randn(sum(q for q, _ in lens), shape.num_heads, shape.head_dim, device="cuda", dtype=shape.dtype)
    seconds = seconds_of(lambda: paged_attention(query, layer, batch, scale=shape.head_dim**-0.5), query.device)
    block_bytes = shape.form.block_bytes(shape.block_size, shape.head_dim)
    num_bytes = shape.num_kv_heads * block_bytes * sum(context for _, context in lens) // shape.block_size
    pairs = sum(q * context - q * (q - 1) // 2 for q, context in lens)
    operations = 4 * shape.num_heads * shape.head_dim * pairs
    return {
        "case": case,
        "form": shape.form.name,
        "ms": round(seconds * 1e3, 4),
        "GB/s": round(num_bytes / seconds / 1e9, 1),
        "of copy": round(num_bytes / seconds / copy_rate, 3),
        "TFLOP/s": round(operations / seconds / 1e12, 2),
        "of product": round(operations / seconds / product_rate, 3),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measures attention over the paged cache; needs a GPU.")
    parser.add_argument("--forms", default=",".join(LLAMA_8B), help=f"some of {','.join(LLAMA_8B)}; all by default")
    parser.add_argument("--output", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args(argv)
    forms = arguments.forms.split(",")
    for form in forms:
        if form not in LLAMA_8B:
            raise SystemExit(f"{form!r} is not one of {', '.join(LLAMA_8B)}")
    device = this_card()
    rates = copy_rate(device), product_rate(device)
    rows = [measure(case, LLAMA_8B[form], *rates) for form in forms for case in CASES]
    figures = {"copy_bytes_per_second": rates[0], "product_operations_per_second": rates[1], "measured": rows}
    print_report("kernels.paged_attention", rows, figures, output=arguments.output)


if __name__ == "__main__":
    main()
