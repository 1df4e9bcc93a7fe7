"""Rows of cached keys and values in registers: loading them from their blocks, and undoing each form of `row_form.py`.

A row that is not there reads as 0, never as what an earlier owner of the block left: 0 · NaN would reach the output.
What is past a head's last dimension reads as some number; the query's is 0 there, and the output's is not stored.

Bytes become float32 by integer arithmetic on their bits, so every architecture reads every form, and most without a
conversion for each number; int8 and int4 then are one multiplication and addition, number · step + origin, in float32.
`SHAPE` is an `AttentionShape`. Knows nothing of sequences.
"""

import triton
import triton.language as tl


@triton.jit
def find_blocks(
    table_ptr,  # [max_num_blocks] int32, of one sequence
    positions,  # [N]
    is_there,  # [N]
    kv_head,
    SHAPE: tl.constexpr,
):
    """[N] int64: which of a plane's records holds each position for this head."""
    blocks = tl.load(table_ptr + positions // SHAPE.block_size, mask=is_there, other=0)
    return blocks.to(tl.int64) * SHAPE.num_kv_heads + kv_head


@triton.jit
def load_rows(
    plane_ptr,  # keys or values, [num_blocks, num_kv_heads, record]: numbers of a float form, else uint8
    blocks,  # [N] int64, as `find_blocks` gives them
    offsets,  # [N], of rows in their blocks
    is_there,  # [N]
    PLANE: tl.constexpr,  # 0: keys, 1: values
    SHAPE: tl.constexpr,
):
    """[N, dims] in the dtype of products."""
    FORM: tl.constexpr = SHAPE.row_forms[PLANE]
    records = blocks * SHAPE.records[PLANE]
    if FORM == "channel4":
        rows = _load_channel4(plane_ptr, records, offsets, is_there, SHAPE)
    elif FORM == "int4":
        rows = _load_int4(plane_ptr, records, offsets, is_there, SHAPE)
    elif FORM == "int8":
        rows = _load_int8(plane_ptr, records, offsets, is_there, SHAPE)
    elif FORM == "fp8":
        rows = _load_fp8(plane_ptr, records, offsets, is_there, SHAPE)
    else:
        rows = _load_values(plane_ptr, records + offsets * SHAPE.head_dim, is_there, SHAPE.head_dim, SHAPE.dims)
    return rows.to(SHAPE.product_type)


@triton.jit
def _load_int8(plane_ptr, records, offsets, is_there, SHAPE: tl.constexpr):
    """[N, dims] float32."""
    # Behind the first bits of 2¹⁵ come those of q + 128. Both products with a scale's 8 bits are exact.
    words = _load_words_of_bytes(plane_ptr, records, offsets, is_there, SHAPE) ^ 0x80808080
    scale = _load_row_scales(plane_ptr, records, offsets, is_there, SHAPE)[:, None]
    origin = (32768 + 128) * scale
    byte0 = (words << 8 & 0xFF00 | 0x47000000).to(tl.float32, bitcast=True) * scale - origin
    byte1 = (words & 0xFF00 | 0x47000000).to(tl.float32, bitcast=True) * scale - origin
    byte2 = (words >> 8 & 0xFF00 | 0x47000000).to(tl.float32, bitcast=True) * scale - origin
    byte3 = (words >> 16 & 0xFF00 | 0x47000000).to(tl.float32, bitcast=True) * scale - origin
    return tl.interleave(tl.interleave(byte0, byte2), tl.interleave(byte1, byte3))


@triton.jit
def _load_fp8(plane_ptr, records, offsets, is_there, SHAPE: tl.constexpr):
    """[N, dims] float32."""
    words = _load_words_of_bytes(plane_ptr, records, offsets, is_there, SHAPE).to(tl.int32, bitcast=True)
    scale = _load_row_scales(plane_ptr, records, offsets, is_there, SHAPE)[:, None]
    byte0 = _e4m3_at_the_top(words << 24) * scale
    byte1 = _e4m3_at_the_top(words << 16) * scale
    byte2 = _e4m3_at_the_top(words << 8) * scale
    byte3 = _e4m3_at_the_top(words) * scale
    return tl.interleave(tl.interleave(byte0, byte2), tl.interleave(byte1, byte3))


@triton.jit
def _e4m3_at_the_top(words):
    """The number in each word's highest byte, as float32."""
    # In float32's places, its exponent is 120 too low; subnormal numbers, which stay so there, work out as well.
    return ((words >> 4) & -0x78100000).to(tl.float32, bitcast=True) * 2.0**120


@triton.jit
def _load_words_of_bytes(plane_ptr, records, offsets, is_there, SHAPE: tl.constexpr):
    """[N, dims / 4] uint32 of a form with one byte a number. Whole words are taken apart with half the instructions."""
    starts = (records + offsets * SHAPE.head_dim) // 4
    return _load_values(
        plane_ptr.to(tl.pointer_type(tl.uint32)), starts, is_there, SHAPE.head_dim // 4, SHAPE.dims // 4
    )


@triton.jit
def _load_row_scales(plane_ptr, records, offsets, is_there, SHAPE: tl.constexpr):
    """[N] float32."""
    # As words of two: what is shorter than 4 bytes cannot be copied ahead of the loop.
    words_ptr = plane_ptr.to(tl.pointer_type(tl.uint32))
    starts = (records + SHAPE.block_size * SHAPE.head_dim) // 4
    words = tl.load(words_ptr + starts + offsets // 2, mask=is_there, other=0)
    return (words >> (offsets % 2 * 16) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _load_int4(plane_ptr, records, offsets, is_there, SHAPE: tl.constexpr):
    """[N, dims] float32."""
    N: tl.constexpr = records.shape[0]
    NUM_GROUPS: tl.constexpr = (SHAPE.head_dim + 31) // 32
    VALUE_BYTES: tl.constexpr = SHAPE.head_dim // 2
    HALF: tl.constexpr = SHAPE.dims // 2
    values = _load_values(plane_ptr, records + offsets * VALUE_BYTES, is_there, VALUE_BYTES, HALF)
    # A group's scale and offset, both bfloat16, are one word.
    words_ptr = plane_ptr.to(tl.pointer_type(tl.uint32))
    starts = (records + SHAPE.block_size * VALUE_BYTES) // 4 + offsets * NUM_GROUPS
    words = _load_values(words_ptr, starts, is_there, NUM_GROUPS, SHAPE.dims // 32)
    scale = (words << 16).to(tl.float32, bitcast=True)
    base = (words & 0xFFFF0000).to(tl.float32, bitcast=True)
    # q in the highest bits of the mantissa of 1 reads as 1 + q / 16.
    step, origin = 16 * scale[:, :, None], (base - 16 * scale)[:, :, None]
    bits = tl.reshape(values, [N, SHAPE.dims // 32, 16]).to(tl.uint32)
    low = (bits << 19 & 0x780000 | 0x3F800000).to(tl.float32, bitcast=True) * step + origin
    high = (bits << 15 & 0x780000 | 0x3F800000).to(tl.float32, bitcast=True) * step + origin
    return tl.interleave(tl.reshape(low, [N, HALF]), tl.reshape(high, [N, HALF]))


@triton.jit
def _load_channel4(plane_ptr, records, offsets, is_there, SHAPE: tl.constexpr):
    """[N, dims] float32."""
    VALUE_BYTES: tl.constexpr = SHAPE.head_dim // 2
    values = _load_values(plane_ptr, records + offsets * VALUE_BYTES, is_there, VALUE_BYTES, SHAPE.dims // 2)
    # A dimension's scale and offset, both bfloat16, are one word. Rows of a block read the same ones.
    words_ptr = plane_ptr.to(tl.pointer_type(tl.uint32))
    starts = (records + SHAPE.block_size * VALUE_BYTES) // 4
    words = _load_values(words_ptr, starts, is_there, SHAPE.head_dim, SHAPE.dims)
    scale = (words << 16).to(tl.float32, bitcast=True)
    base = (words & 0xFFFF0000).to(tl.float32, bitcast=True)
    bits = values.to(tl.uint32)
    # q in the highest bits of the mantissa of 1 reads as 1 + q / 16.
    numbers = tl.interleave(bits << 19 & 0x780000 | 0x3F800000, bits << 15 & 0x780000 | 0x3F800000)
    return (numbers.to(tl.float32, bitcast=True) - 1) * (16 * scale) + base


@triton.jit
def load_open_keys(
    open_keys_ptr,  # [num_pages, num_kv_heads, block_size, head_dim] bfloat16
    open_table_ptr,  # [max_num_pages] int32, of one sequence
    first_block,  # whose page comes first there
    positions,  # [N]
    is_there,  # [N]
    kv_head,
    SHAPE: tl.constexpr,
):
    """[N, dims] in the dtype of products."""
    pages = tl.load(open_table_ptr + positions // SHAPE.block_size - first_block, mask=is_there, other=0)
    rows = (pages.to(tl.int64) * SHAPE.num_kv_heads + kv_head) * SHAPE.block_size + positions % SHAPE.block_size
    keys = _load_values(open_keys_ptr, rows * SHAPE.head_dim, is_there, SHAPE.head_dim, SHAPE.dims)
    return keys.to(SHAPE.product_type)


@triton.jit
def _load_values(plane_ptr, starts, is_there, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """[N, PADDED]: `SIZE` elements from each start on, then zeros."""
    places = tl.arange(0, PADDED)
    is_value = is_there[:, None]
    if SIZE != PADDED:
        is_value = is_value & (places < SIZE)[None, :]
    return tl.load(plane_ptr + starts[:, None] + places[None, :], mask=is_value, other=0)
