"""Keys of blocks that a step fills, out of their pages and into their records, four bits a number.

    offset = min x,  scale = (max x − offset) / 15,  q = round((x − offset) / scale)   over the rows of a block

for each dimension (`row_form.py`, channel4). Moves a block's keys in once, 2 · block_size · head_dim bytes a KV head,
and a third of that out. A program has one block and KV head; those whose block is not full do nothing, since how many
there are has to follow from Python ints.
"""

from typing import Any

import triton
import triton.language as tl

from pagedd.kernels.kv_form import FORMS
from pagedd.kernels.layout import PagedBatch, QuantizedLayer
from pagedd.kernels.triton.kv_quantize import quantize_channels
from pagedd.kernels.triton.variant import Variant

_NUM_WARPS = 1  # a block's keys are a few KiB


def close_blocks(kv_layer: QuantizedLayer, batch: PagedBatch) -> None:
    """Quantizes the keys of every block that the batch's tokens fill.

    Args:
        kv_layer: of a form with open keys; this step's keys are in their pages.
    """
    num_seqs, width = batch.open_tables.shape
    keys = kv_layer.planes[0]
    _close_blocks_kernel[(num_seqs * width, keys.shape[1])](
        keys,
        kv_layer.open_keys,
        batch.query_starts,
        batch.context_lens,
        batch.block_tables,
        batch.open_tables,
        batch.block_tables.stride(0),
        batch.open_tables.stride(0),
        width,
        keys.shape[1],
        **_constants(kv_layer.block_size, kv_layer.head_dim, keys.shape[2]),
        num_warps=_NUM_WARPS,
    )


def _constants(block_size: int, head_dim: int, record: int) -> dict[str, Any]:
    return {
        "BLOCK_SIZE": block_size,
        "HEAD_DIM": head_dim,
        "DIMS": int(triton.next_power_of_2(head_dim)),
        "RECORD": record,
    }


# Numbers that differ from step to step must not make a kernel of their own each.
@triton.jit(
    do_not_specialize=["table_stride", "open_stride", "width"],
    do_not_specialize_on_alignment=["query_starts_ptr", "context_lens_ptr", "block_tables_ptr", "open_tables_ptr"],
)
def _close_blocks_kernel(
    keys_ptr,  # [num_blocks, num_kv_heads, record] bytes
    open_keys_ptr,  # [num_pages, num_kv_heads, block_size, head_dim] bfloat16
    query_starts_ptr,  # [num_seqs + 1] int32
    context_lens_ptr,  # [num_seqs] int32
    block_tables_ptr,  # [num_seqs, max_num_blocks] int32
    open_tables_ptr,  # [num_seqs, width] int32
    table_stride,
    open_stride,
    width,
    num_kv_heads,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    RECORD: tl.constexpr,
):
    seq, column = (tl.program_id(0) // width).to(tl.int64), tl.program_id(0) % width
    kv_head = tl.program_id(1)
    query_len = tl.load(query_starts_ptr + seq + 1) - tl.load(query_starts_ptr + seq)
    context_len = tl.load(context_lens_ptr + seq)
    logical = (context_len - query_len) // BLOCK_SIZE + column
    if logical < context_len // BLOCK_SIZE:
        page = tl.load(open_tables_ptr + seq * open_stride + column).to(tl.int64)
        block = tl.load(block_tables_ptr + seq * table_stride + logical).to(tl.int64)
        rows, dims, pairs = tl.arange(0, BLOCK_SIZE), tl.arange(0, DIMS), tl.arange(0, DIMS // 2)
        keys = open_keys_ptr + (page * num_kv_heads + kv_head) * BLOCK_SIZE * HEAD_DIM
        is_key = (dims < HEAD_DIM)[None, :]
        x = tl.load(keys + rows[:, None] * HEAD_DIM + dims[None, :], mask=is_key, other=0.0).to(tl.float32)
        values, words = quantize_channels(x)
        record = keys_ptr + (block * num_kv_heads + kv_head) * RECORD
        places = rows[:, None] * (HEAD_DIM // 2) + pairs[None, :]
        tl.store(record + places, values, mask=(pairs < HEAD_DIM // 2)[None, :])
        words_ptr = (record + BLOCK_SIZE * (HEAD_DIM // 2)).to(tl.pointer_type(tl.uint32))
        tl.store(words_ptr + dims, words, mask=dims < HEAD_DIM)


def variants(arch: int) -> list[Variant]:
    """A Llama-8B's, in blocks of both sizes, and a Gemma 2's."""
    pointers = {"keys_ptr": "*u8", "open_keys_ptr": "*bf16"}
    tables = ("query_starts_ptr", "context_lens_ptr", "block_tables_ptr", "open_tables_ptr")
    numbers = ("table_stride", "open_stride", "width", "num_kv_heads")
    found = []
    for block_size, head_dim in ((16, 128), (32, 128), (16, 256)):
        constants = _constants(block_size, head_dim, FORMS["int4"].record_bytes(0, block_size, head_dim))
        found.append(
            Variant(
                f"close_blocks.{block_size}{f'.{head_dim}' if head_dim != 128 else ''}",
                _close_blocks_kernel,
                pointers
                | dict.fromkeys(tables, "*i32")
                | dict.fromkeys(numbers, "i32")
                | dict.fromkeys(constants, "constexpr"),
                constants,
                aligned=frozenset(pointers),
                num_warps=_NUM_WARPS,
                must_fit=True,
            )
        )
    return found
