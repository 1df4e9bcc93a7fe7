"""Rows of keys and values into the cache, in each form of `row_form.py`: to the last bit what `RowForm.quantize` gives.

In integer arithmetic where rounding decides, so that every architecture writes the same bytes: e4m3 on cards that have
no such conversion, bfloat16 scales that are never rounded twice. What reads them back is `kv_rows.py`.
"""

import triton
import triton.language as tl

_INFINITY = tl.constexpr(0x7F800000)  # as float32; NaNs are above
_NAN_SCALE = tl.constexpr(0x7FC0)  # as bfloat16
_SMALLEST_NORMAL = tl.constexpr(0x0080)  # as bfloat16
# What is added to a number below 2²² rounds it to an integer, ties to even, and leaves that in the lowest bits.
_ROUNDER = tl.constexpr(1.5 * 2**23)
_E4M3_ROUNDER = tl.constexpr(2.0**14)  # the same, to multiples of 2⁻⁹: the subnormal numbers of e4m3


@triton.jit
def write_rows(
    x,  # [ROWS, DIMS] float32, one row a head; 0 past HEAD_DIM
    cache_ptr,  # elements of a float form, else bytes
    records,  # [ROWS] int64, where each head's record begins
    offset,  # int64, of the token in its block
    is_there,  # [ROWS]
    FORM: tl.constexpr,  # "float", or the name of a form of rows
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Writes the row of one token into the record of each head."""
    if FORM == "float":
        _store(cache_ptr, records + offset * HEAD_DIM, x.to(cache_ptr.dtype.element_ty), is_there, HEAD_DIM)
    elif FORM == "int4":
        values, words = _quantize_int4(x, HEAD_DIM)
        VALUE_BYTES: tl.constexpr = HEAD_DIM // 2
        NUM_GROUPS: tl.constexpr = (HEAD_DIM + 31) // 32
        _store(cache_ptr, records + offset * VALUE_BYTES, values, is_there, VALUE_BYTES)
        words_ptr = cache_ptr.to(tl.pointer_type(tl.uint32))
        _store(words_ptr, (records + BLOCK_SIZE * VALUE_BYTES) // 4 + offset * NUM_GROUPS, words, is_there, NUM_GROUPS)
    else:
        LIMIT: tl.constexpr = 127.0 if FORM == "int8" else 448.0
        widest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)  # of bits, which are in the numbers' order
        scales, inverse = _step(widest.to(tl.float32, bitcast=True), 1 / LIMIT, widest < _INFINITY)
        scaled = _scaled(x, inverse[:, None], -LIMIT, LIMIT)
        values = _round(scaled).to(tl.uint8) if FORM == "int8" else _to_e4m3(scaled)
        _store(cache_ptr, records + offset * HEAD_DIM, values, is_there, HEAD_DIM)
        scales_ptr = cache_ptr.to(tl.pointer_type(tl.uint16))
        tl.store(scales_ptr + (records + BLOCK_SIZE * HEAD_DIM) // 2 + offset, scales.to(tl.uint16), mask=is_there)


@triton.jit
def _store(ptr, starts, values, is_there, SIZE: tl.constexpr):
    """`SIZE` elements of each row of `values`, from its start on."""
    place = tl.arange(0, values.shape[1])
    tl.store(ptr + starts[:, None] + place[None, :], values, mask=is_there[:, None] & (place < SIZE)[None, :])


@triton.jit
def _step(width, PER_STEP: tl.constexpr, is_finite):
    """The scale that spreads `width` over its steps, as bits of bfloat16, and the inverse of what was rounded.

    The inverse is 0 where every value becomes 0: of a scale that is 0, infinite or NaN.
    """
    bits = (width * PER_STEP).to(tl.int32, bitcast=True)
    is_finite = is_finite & (bits < _INFINITY)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = tl.where(is_finite & (rounded >= _SMALLEST_NORMAL), rounded, 0)
    wide = (rounded << 16).to(tl.float32, bitcast=True)
    inverse = tl.where(wide > 0, tl.div_rn(1.0, tl.where(wide > 0, wide, 1.0)), 0.0)
    return tl.where(is_finite, rounded, _NAN_SCALE), inverse


@triton.jit
def _scaled(x, inverse, LOWEST: tl.constexpr, HIGHEST: tl.constexpr):
    """x · inverse within the limits; 0 where the inverse is, whatever x."""
    return tl.where(inverse == 0, 0.0, tl.minimum(tl.maximum(x * inverse, LOWEST), HIGHEST))


@triton.jit
def _round(x):
    """Numbers below 2²² to integers, ties to even, in as many of the lowest bits as they need."""
    return (x + _ROUNDER).to(tl.int32, bitcast=True)


@triton.jit
def _to_e4m3(x):
    """float32 within ±448 to the bits of e4m3, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # 3 of 23 bits of mantissa remain, and the exponent's bias becomes 7.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    subnormal = (size.to(tl.float32, bitcast=True) + _E4M3_ROUNDER).to(tl.int32, bitcast=True) & 0xF
    is_normal = size >= 0x3C800000  # 2⁻⁶
    return (tl.where(is_normal, normal, subnormal) | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _quantize_int4(x, HEAD_DIM: tl.constexpr):
    """Bytes of two values, [ROWS, DIMS // 2], and a word of scale and offset a group, [ROWS, DIMS // 32] uint32."""
    ROWS: tl.constexpr = x.shape[0]
    DIMS: tl.constexpr = x.shape[1]
    shape: tl.constexpr = [ROWS, DIMS // 32, 32]
    is_number = (tl.arange(0, DIMS) < HEAD_DIM)[None, :]
    is_finite = tl.max(tl.reshape(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, shape), axis=2) < _INFINITY
    lowest = tl.min(tl.reshape(tl.where(is_number, x, float("inf")), shape), axis=2)
    highest = tl.max(tl.reshape(tl.where(is_number, x, float("-inf")), shape), axis=2)
    base, inverse, words = _group_step(lowest, highest, is_finite)
    q = _round(_scaled(tl.reshape(x, shape) - base[:, :, None], inverse[:, :, None], 0.0, 15.0)) & 0xF
    low, high = tl.split(tl.reshape(q, [ROWS, DIMS // 2, 2]))
    return (low | (high << 4)).to(tl.uint8), words


@triton.jit
def _group_step(lowest, highest, is_finite):
    """Offset and inverse of the scale of groups that 4 bits are to hold, and the word of both that is written."""
    lowest = tl.where(is_finite & (lowest != 0), lowest, 0.0)  # no negative zero
    bits = lowest.to(tl.int32, bitcast=True)
    offset = (bits >> 16) + ((bits < 0) & ((bits & 0xFFFF) != 0)).to(tl.int32)  # rounded down
    base = (offset << 16).to(tl.float32, bitcast=True)
    scale, inverse = _step(highest - base, 1 / 15, is_finite)
    return base, inverse, (scale | (offset << 16)).to(tl.uint32, bitcast=True)


@triton.jit
def quantize_channels(x):
    """A block's keys [ROWS, DIMS] float32: bytes of two values, [ROWS, DIMS // 2], and a word a dimension, [DIMS]."""
    is_finite = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0) < _INFINITY
    base, inverse, words = _group_step(tl.min(x, axis=0), tl.max(x, axis=0), is_finite)
    q = _round(_scaled(x - base[None, :], inverse[None, :], 0.0, 15.0)) & 0xF
    low, high = tl.split(tl.reshape(q, [x.shape[0], x.shape[1] // 2, 2]))
    return (low | (high << 4)).to(tl.uint8), words
