"""Rows of cached keys and values in registers: loading them from their blocks, and undoing each form of `kv_form.py`.

A row that is not there and the dimensions past the head's own read as 0, never as what an earlier owner of the block
left: 0 · NaN would reach the output. Rows that int8 and fp8 hold come without their scale, which multiplies a key's
scores and a value's weights, once for a row instead of once for a number; int4, with a scale for each group of 32,
comes whole.

Bytes are taken apart with integer arithmetic, so every architecture reads every form. `SHAPE` is an `AttentionShape`.
Knows nothing of sequences.
"""

import triton
import triton.language as tl

# The interpreter computes with bfloat16's bits as if they were integers, so there it has to widen first.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

_E4M3_UNIT = tl.constexpr(256.0)  # e4m3's bits in float16's places make a number smaller by the biases' difference


@triton.jit
def find_records(
    table_ptr,  # [max_num_blocks] int32, of one sequence
    positions,  # [N]
    is_there,  # [N]
    kv_head,
    SHAPE: tl.constexpr,
):
    """[N] int64: where in a plane the block of each position begins for this head, in elements of the plane."""
    blocks = tl.load(table_ptr + positions // SHAPE.block_size, mask=is_there, other=0)
    return (blocks.to(tl.int64) * SHAPE.num_kv_heads + kv_head) * SHAPE.record


@triton.jit
def load_rows(
    plane_ptr,  # keys or values, [num_blocks, num_kv_heads, record]: numbers of a float form, else uint8
    records,  # [N] int64, as `find_records` gives them
    offsets,  # [N], of rows in their blocks
    is_there,  # [N]
    SHAPE: tl.constexpr,
):
    """[N, dims] in the dtype of products; to be multiplied by `load_row_scales` where the form has them."""
    DTYPE: tl.constexpr = SHAPE.product_type
    if SHAPE.form_name == "int4":
        rows = _load_int4(plane_ptr, records, offsets, is_there, SHAPE)
    else:
        rows = _load_values(plane_ptr, records + offsets * SHAPE.head_dim, is_there, SHAPE.head_dim, SHAPE.dims)
        if SHAPE.form_name == "int8":
            numbers = rows.to(tl.int8, bitcast=True)
            rows = numbers.to(tl.float32).to(DTYPE) if INTERPRETED else numbers.to(DTYPE)
        elif SHAPE.form_name == "fp8":
            # Sign, exponent and mantissa come in the order of float16's, and subnormal numbers work out as well.
            bits = (rows.to(tl.int8, bitcast=True).to(tl.int16) << 7) & -0x4080
            rows = bits.to(tl.float16, bitcast=True).to(DTYPE)
    return rows


@triton.jit
def load_row_scales(
    plane_ptr,  # uint8
    records,  # [N] int64
    offsets,  # [N]
    is_there,  # [N]
    SHAPE: tl.constexpr,
):
    """[N] float32, of int8 and fp8."""
    scales_ptr = plane_ptr.to(tl.pointer_type(tl.uint16))
    starts = (records + SHAPE.block_size * SHAPE.head_dim) // 2
    bits = tl.load(scales_ptr + starts + offsets, mask=is_there, other=0)
    scales = (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return scales * _E4M3_UNIT if SHAPE.form_name == "fp8" else scales


@triton.jit
def _load_int4(plane_ptr, records, offsets, is_there, SHAPE: tl.constexpr):
    N: tl.constexpr = records.shape[0]
    DTYPE: tl.constexpr = SHAPE.product_type
    VALUE_BYTES: tl.constexpr = SHAPE.head_dim // 2
    HALF: tl.constexpr = SHAPE.dims // 2
    NUM_GROUPS: tl.constexpr = (SHAPE.head_dim + 31) // 32
    values = _load_values(plane_ptr, records + offsets * VALUE_BYTES, is_there, VALUE_BYTES, HALF)
    # A group's scale and offset, both bfloat16, are one word.
    words_ptr = plane_ptr.to(tl.pointer_type(tl.uint32))
    starts = (records + SHAPE.block_size * VALUE_BYTES) // 4 + offsets * NUM_GROUPS
    words = _load_values(words_ptr, starts, is_there, NUM_GROUPS, SHAPE.dims // 32)
    scale = (words << 16).to(tl.float32, bitcast=True)
    base = (words & 0xFFFF0000).to(tl.float32, bitcast=True)
    # q in the highest bits of a mantissa reads as 1 + q / 16, which spares a conversion for each number.
    step, origin = 16 * scale[:, :, None], (base - 16 * scale)[:, :, None]
    bits = tl.reshape(values, [N, SHAPE.dims // 32, 16]).to(tl.uint32)
    low = ((bits << 19) & 0x780000 | 0x3F800000).to(tl.float32, bitcast=True) * step + origin
    high = ((bits << 15) & 0x780000 | 0x3F800000).to(tl.float32, bitcast=True) * step + origin
    return tl.interleave(tl.reshape(low.to(DTYPE), [N, HALF]), tl.reshape(high.to(DTYPE), [N, HALF]))


@triton.jit
def _load_values(plane_ptr, starts, is_there, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """[N, PADDED]: `SIZE` elements from each start on, then zeros."""
    places = tl.arange(0, PADDED)
    is_value = is_there[:, None]
    if SIZE != PADDED:
        is_value = is_value & (places < SIZE)[None, :]
    return tl.load(plane_ptr + starts[:, None] + places[None, :], mask=is_value, other=0)
