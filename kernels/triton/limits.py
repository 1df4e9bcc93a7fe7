"""What of a model the kernels cannot be launched for, told from its sizes: before a weight is read.

Asks the launch table what attention has, and knows what the kernels presume of sizes that are in no table. No card. Its
variants are the largest tiles that the table has: compiling them shows that they fit a card's shared memory.
"""

from itertools import product

import torch

from pagedd.kernels.errors import UnfitError
from pagedd.kernels.kv_form import FORMS, KVForm
from pagedd.kernels.triton.attention_shape import AttentionShape, chunk_launch, short_launch
from pagedd.kernels.triton.card import WITHOUT_BFLOAT16, WITHOUT_MATRIX_INSTRUCTIONS
from pagedd.kernels.triton.paged_attention import variant_of
from pagedd.kernels.triton.rms_norm import LONGEST_ROW
from pagedd.kernels.triton.variant import Variant


def obstacle(
    arch: int,
    dtype: torch.dtype,
    form: KVForm,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    hidden_size: int,
) -> str | None:
    """Why the kernels cannot run a model of these sizes, with value, limit and what to do; `None` when they can.

    Args:
        arch: compute capability: 90 of sm_90.
        dtype: of activations.
        form: of the cache.
    """
    if hidden_size > LONGEST_ROW:
        return f"hidden_size {hidden_size}, rows of at most {LONGEST_ROW} fit a norm's kernel; use device cpu"
    if not form.fits(head_dim):
        in_16_bits = "fp16" if arch in WITHOUT_BFLOAT16 else "bf16"
        return f"head_dim {head_dim} over a {form.name} cache needs a multiple of 4; use kv_cache_dtype {in_16_bits}"
    shape = AttentionShape(dtype, form, num_kv_heads, num_heads // num_kv_heads, 16, head_dim)
    try:
        short_launch(arch, shape, shape.group)
        chunk_launch(arch, shape)
    except UnfitError as error:
        return (
            f"{shape.group} query heads a KV head, of {head_dim} numbers of {shape.product_dtype.itemsize} bytes, over "
            f"a {form.name} cache: {error}; use device cpu, or 16 bits where there are more"
        )
    return None


# Head size and query heads a KV head.
_LARGEST = ((256, 128), (512, 32))
_LARGEST_WITHOUT_MATRIX_INSTRUCTIONS = ((64, 128), (128, 64), (256, 32))


def variants(arch: int) -> list[Variant]:
    """The largest tiles of each kind. They may spill: what counts is that they can be launched at all."""
    largest = _LARGEST_WITHOUT_MATRIX_INSTRUCTIONS if arch in WITHOUT_MATRIX_INSTRUCTIONS else _LARGEST
    found = []
    for (head_dim, group), form in product(largest, ("fp16", "int8", "int4")):
        shape = AttentionShape(torch.float16, FORMS[form], 1, group, 16, head_dim)
        short, chunk = short_launch(arch, shape, group), chunk_launch(arch, shape)
        name = f"{form}.{group}x{head_dim}"
        found.append(variant_of(f"limits.short.{name}", shape, short, None))
        found.append(variant_of(f"limits.chunk.{name}", shape, None, chunk))
    return found
