"""A step's new queries, keys and values: rotated, and written into their slots in the form of the cache.

    rotated[d] = x[d] · cos[d] − x[d + half] · sin[d]            (Su et al. 2021, half-split order)
    rotated[d + half] = x[d + half] · cos[d] + x[d] · sin[d]

Moves the query in and out, key and value in once and out once in the form of the cache, and a row of cosines and sines
a token for each 8 heads (from the caches, after the first). One launch instead of four, and the rotated key is never
written anywhere but to its slot.

A program has a few heads of one token: their rows are adjacent, in the activations as they are in a record. What it
does depends on which heads they are. Forms of the cache are the business of `kv_quantize.py`.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from pagedd.kernels.kv_form import FORMS, KVForm, form_of
from pagedd.kernels.layout import KVLayer, QuantizedLayer, has_open_keys, planes_of
from pagedd.kernels.triton.attention_shape import row_forms
from pagedd.kernels.triton.card import card_of
from pagedd.kernels.triton.kv_quantize import write_rows
from pagedd.kernels.triton.launch import Launch, launch_for
from pagedd.kernels.triton.variant import TRITON_TYPES, Variant


@triton.jit
def _turn(x, partner, cos, sin):
    """x · cos + partner · sin, rounded in the one order wherever it is compiled."""
    return tl.fma(x, cos, partner * sin)


@triton.jit
def _rotate_in_place(
    x_ptr,  # [num_heads, head_dim] of one token
    cos_ptr,  # [head_dim // 2] of the token
    sin_ptr,
    first_head,
    num_heads,
    head_stride,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    head = first_head + tl.arange(0, HEADS)
    dim = tl.arange(0, triton.next_power_of_2(HALF))
    angle_is_inside = dim < HALF
    is_inside = (head < num_heads)[:, None] & angle_is_inside[None, :]
    cos = tl.load(cos_ptr + dim, mask=angle_is_inside, other=0.0)[None, :]
    sin = tl.load(sin_ptr + dim, mask=angle_is_inside, other=0.0)[None, :]
    place = x_ptr + head[:, None] * head_stride + dim[None, :]
    # Both halves of a pair are one thread's, so none is overwritten before it was read.
    first = tl.load(place, mask=is_inside, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(place, _turn(first, second, cos, -sin).to(x_ptr.dtype.element_ty), mask=is_inside)
    tl.store(place + HALF, _turn(second, first, cos, sin).to(x_ptr.dtype.element_ty), mask=is_inside)


@triton.jit
def _load_heads(x_ptr, head, num_heads, head_stride, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr):
    """[HEADS, DIMS] float32 of one token; 0 past the heads and dimensions that there are."""
    dim = tl.arange(0, DIMS)
    is_inside = (head < num_heads)[:, None] & (dim < HEAD_DIM)[None, :]
    return tl.load(x_ptr + head[:, None] * head_stride + dim[None, :], mask=is_inside, other=0.0).to(tl.float32)


@triton.jit
def _load_rotated(x_ptr, cos_ptr, sin_ptr, head, num_heads, head_stride, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr):
    """As `_load_heads`, and rotated; rounded as if it had been written and read again.

    A row comes whole, so that it can be quantized whole: each number's partner is loaded beside it, from the cache
    lines that are there already.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    dim = tl.arange(0, DIMS)
    is_first = dim < HALF
    is_inside = (head < num_heads)[:, None] & (dim < HEAD_DIM)[None, :]
    angle = tl.where(is_first, dim, dim - HALF)
    cos = tl.load(cos_ptr + angle, mask=dim < HEAD_DIM, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=dim < HEAD_DIM, other=0.0)
    row = x_ptr + head[:, None] * head_stride
    x = tl.load(row + dim[None, :], mask=is_inside, other=0.0).to(tl.float32)
    partner = tl.load(row + tl.where(is_first, dim + HALF, angle)[None, :], mask=is_inside, other=0.0).to(tl.float32)
    rotated = _turn(x, partner, cos[None, :], tl.where(is_first, -sin, sin)[None, :])
    return rotated.to(x_ptr.dtype.element_ty).to(tl.float32)


# A step's tables may begin anywhere in a longer tensor; that must not make a kernel of its own.
@triton.jit(do_not_specialize_on_alignment=["slot_ptr", "open_slot_ptr"])
def _rope_kv_kernel(
    query_ptr,  # [num_tokens, num_heads, head_dim]
    key_ptr,  # [num_tokens, num_kv_heads, head_dim]
    value_ptr,  # as the key
    cos_ptr,  # [num_tokens, head_dim // 2] float32
    sin_ptr,
    keys_ptr,  # [num_blocks, num_kv_heads, record]: rows of the dtype of a float form, else bytes
    values_ptr,  # the same; records may be of another size
    open_keys_ptr,  # [num_pages, num_kv_heads, block_size, head_dim]; only where the form has open keys
    slot_ptr,  # [num_tokens] int64
    open_slot_ptr,  # the same, of pages
    num_heads,
    num_kv_heads,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    HAS_ROPE: tl.constexpr,  # else there is no query, and the key is written as it is
    FORMS: tl.constexpr,  # of keys and of values, as `write_rows` takes them
    RECORDS: tl.constexpr,  # of keys and of values: size, in elements
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,  # of a program
    KV_TILES: tl.constexpr,  # programs for a token's keys, and for its values
):
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    angles = token * (HEAD_DIM // 2)
    if tile >= 2 * KV_TILES:
        _rotate_in_place(
            query_ptr + token * query_token_stride,
            cos_ptr + angles,
            sin_ptr + angles,
            (tile - 2 * KV_TILES) * HEADS,
            num_heads,
            query_head_stride,
            HEAD_DIM,
            HEADS,
        )
    else:
        # Out of a tuple, Triton before 3.9 passes on a plain string, which is no constant to it.
        KEY_FORM: tl.constexpr = FORMS[0]
        VALUE_FORM: tl.constexpr = FORMS[1]
        DIMS: tl.constexpr = max(32, triton.next_power_of_2(HEAD_DIM))  # at least an int4 group
        slot = tl.load(slot_ptr + token)
        block = slot // BLOCK_SIZE
        head = tile % KV_TILES * HEADS + tl.arange(0, HEADS)
        records = block * num_kv_heads + head
        offset = slot % BLOCK_SIZE
        if tile < KV_TILES:
            start = key_ptr + token * key_token_stride
            if HAS_ROPE:
                key = _load_rotated(
                    start, cos_ptr + angles, sin_ptr + angles, head, num_kv_heads, key_head_stride, HEAD_DIM, DIMS
                )
            else:
                key = _load_heads(start, head, num_kv_heads, key_head_stride, HEAD_DIM, DIMS)
            is_there = head < num_kv_heads
            if KEY_FORM == "channel4":
                page = tl.load(open_slot_ptr + token) // BLOCK_SIZE
                places = (page * num_kv_heads + head) * (BLOCK_SIZE * HEAD_DIM)
                write_rows(key, open_keys_ptr, places, offset, is_there, "float", HEAD_DIM, BLOCK_SIZE)
            else:
                write_rows(key, keys_ptr, records * RECORDS[0], offset, is_there, KEY_FORM, HEAD_DIM, BLOCK_SIZE)
        else:
            start = value_ptr + token * value_token_stride
            value = _load_heads(start, head, num_kv_heads, value_head_stride, HEAD_DIM, DIMS)
            is_there = head < num_kv_heads
            write_rows(value, values_ptr, records * RECORDS[1], offset, is_there, VALUE_FORM, HEAD_DIM, BLOCK_SIZE)


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_layer: KVLayer,
    slot_mapping: torch.Tensor,
    open_slots: torch.Tensor | None = None,
) -> None:
    """Stores each row's key and value in its slot, in the form of the cache. Arguments as in `rope_and_write_kv`."""
    _launch_rope_kv(None, key, value, None, kv_layer, slot_mapping, open_slots)


def rope_and_write_kv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_layer: KVLayer,
    slot_mapping: torch.Tensor,
    open_slots: torch.Tensor | None = None,
) -> None:
    """Rotates `query` in place, and writes the rotated key, and the value, into their slots. `key` stays as it is.

    What is written is what `write_kv` would write of a key that was rotated as the query is, to the last bit.

    Args:
        query: [num_tokens, num_heads, head_dim], any float dtype; like key and value, a view into wider rows if need
            be, in which the numbers of a head lie together.
        key, value: [num_tokens, num_kv_heads, head_dim], of one dtype.
        cos, sin: [num_tokens, head_dim // 2] float32, contiguous.
        kv_layer: [2, num_blocks, num_kv_heads, block_size, head_dim], or quantized; written in place.
        slot_mapping: [num_tokens] int64, no slot twice but those of padding, as `ops.write_kv` says.
        open_slots: [num_tokens] int64, slots of pages; where the form of the cache has open keys.
    """
    _launch_rope_kv(query, key, value, (cos, sin), kv_layer, slot_mapping, open_slots)


def _launch_rope_kv(
    query: torch.Tensor | None,
    key: torch.Tensor,
    value: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor] | None,
    kv_layer: KVLayer,
    slot_mapping: torch.Tensor,
    open_slots: torch.Tensor | None,
) -> None:
    num_tokens, num_kv_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    if isinstance(kv_layer, QuantizedLayer):
        form, block_size = kv_layer.form, kv_layer.block_size
    else:
        form, block_size = form_of(kv_layer.dtype), kv_layer.shape[3]
    keys, values = planes_of(kv_layer)
    open_keys = kv_layer.open_keys if has_open_keys(kv_layer) else keys
    launch = launch_for("rope_kv", card_of(key.device).arch)
    constants = _constants(launch, form, block_size, head_dim, num_kv_heads, has_rope=query is not None)
    cos, sin = angles or (key, key)  # not read
    rotated = key if query is None else query
    query_tiles = 0 if query is None else triton.cdiv(query.shape[1], constants["HEADS"])
    _rope_kv_kernel[(num_tokens, 2 * constants["KV_TILES"] + query_tiles)](
        rotated,
        key,
        value,
        cos,
        sin,
        keys,
        values,
        open_keys,
        slot_mapping,
        slot_mapping if open_slots is None else open_slots,
        rotated.shape[1],
        num_kv_heads,
        rotated.stride(0),
        rotated.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        **constants,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )


def _constants(
    launch: Launch, form: KVForm, block_size: int, head_dim: int, num_kv_heads: int, *, has_rope: bool
) -> dict[str, Any]:
    heads = launch.tiles["heads"]
    itemsize = 1 if form.dtype is None else form.dtype.itemsize
    return {
        "HAS_ROPE": has_rope,
        "FORMS": row_forms(form),
        "RECORDS": tuple(form.record_bytes(plane, block_size, head_dim) // itemsize for plane in range(2)),
        "BLOCK_SIZE": block_size,
        "HEAD_DIM": head_dim,
        "HEADS": heads,
        "KV_TILES": triton.cdiv(num_kv_heads, heads),
    }


def variants(arch: int) -> list[Variant]:
    """A Llama-8B's over every form of the cache, Gemma 2's and Phi 3's, and a head whose half is no power of two."""
    dtypes = (torch.bfloat16, torch.float16)
    return [
        *(_variant(arch, dtype, form) for dtype in dtypes for form in _SERVED),
        *(
            _variant(arch, dtype, form, head_dim=head_dim, num_kv_heads=num_kv_heads)
            for dtype in dtypes
            for head_dim, num_kv_heads in ((256, 8), (96, 32))
            for form in (form_of(dtype).name, "int8", "int4")
            if form != "int4" or head_dim == 256
        ),
        *(_variant(arch, torch.bfloat16, form, head_dim=80) for form in _SERVED),
        _variant(arch, torch.bfloat16, "int4", has_rope=False),
    ]


_SERVED = [form for form in FORMS if form != "float32"]


def _variant(
    arch: int, dtype: torch.dtype, form: str, *, head_dim: int = 128, num_kv_heads: int = 8, has_rope: bool = True
) -> Variant:
    launch = launch_for("rope_kv", arch)
    kind, cache = TRITON_TYPES[dtype], TRITON_TYPES[FORMS[form].dtype or torch.uint8]
    activations = ("query_ptr", "key_ptr", "value_ptr")
    strides = [f"{name}_{unit}_stride" for name in ("query", "key", "value") for unit in ("token", "head")]
    return Variant(
        name=f"rope_kv.{'' if has_rope else 'write.'}{kind}.{form}.{head_dim}",
        kernel=_rope_kv_kernel,
        signature=dict.fromkeys(activations, f"*{kind}")
        | dict.fromkeys(("cos_ptr", "sin_ptr"), "*fp32")
        | dict.fromkeys(("slot_ptr", "open_slot_ptr"), "*i64")
        | dict.fromkeys(("keys_ptr", "values_ptr"), f"*{cache}")
        | {"open_keys_ptr": "*bf16" if FORMS[form].has_open_keys else f"*{cache}"}
        | dict.fromkeys(("num_heads", "num_kv_heads", *strides), "i32"),
        constants=_constants(launch, FORMS[form], 16, head_dim, num_kv_heads, has_rope=has_rope),
        aligned=frozenset((*activations, "cos_ptr", "sin_ptr", "keys_ptr", "values_ptr", "open_keys_ptr", *strides)),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        must_fit=head_dim != 80,
    )
