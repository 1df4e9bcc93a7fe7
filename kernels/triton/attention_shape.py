"""What an attention kernel is compiled for: one constant, of which the kernels read attributes."""

from dataclasses import dataclass, fields
from typing import Any

import torch
import triton
import triton.language as tl

from pagedd.kernels.kv_form import FORMS, KVForm, form_of
from pagedd.kernels.layout import KVLayer, QuantizedLayer
from pagedd.kernels.row_form import GROUP
from pagedd.kernels.triton.card import WITHOUT_BFLOAT16, WITHOUT_MATRIX_INSTRUCTIONS
from pagedd.kernels.triton.launch import Launch, launch_for
from pagedd.kernels.triton.variant import TRITON_TYPES

_TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True, slots=True, repr=False)
class AttentionShape:
    """One model's attention over one form of cache. Everything is known when a kernel is compiled.

    Triton finds a compiled kernel on its disk again by its source and the text of its constants. So the text of this
    one has all that kernels read of it, the layout that is derived from the fields included: where a record's layout
    changes, so does the text, and no kernel is found that reads the one before.

    Attributes:
        dtype: of queries and outputs.
        group: query heads that share a KV head.
        sliding_window, soft_cap: as in `ops.paged_attention`.
    """

    dtype: torch.dtype
    form: KVForm
    num_kv_heads: int
    group: int
    block_size: int
    head_dim: int
    sliding_window: int | None = None
    soft_cap: float | None = None

    @classmethod
    def of(
        cls, query: torch.Tensor, kv_layer: KVLayer, sliding_window: int | None, soft_cap: float | None
    ) -> "AttentionShape":
        """Of a call.

        Raises:
            ValueError: a tensor does not lie in memory as the kernels read it.
        """
        if isinstance(kv_layer, QuantizedLayer):
            keys, form, block_size = kv_layer.planes[0], kv_layer.form, kv_layer.block_size
        else:
            keys, form, block_size = kv_layer[0], form_of(kv_layer.dtype), kv_layer.shape[3]
        _, num_heads, head_dim = query.shape
        if not keys.is_contiguous():
            raise ValueError(f"the keys of a layer have strides {keys.stride()}; they have to be contiguous")
        if query.stride()[1:] != (head_dim, 1):
            raise ValueError(f"query has strides {query.stride()}; the heads of a row have to be contiguous")
        num_kv_heads = keys.shape[1]
        return cls(
            query.dtype,
            form,
            num_kv_heads,
            num_heads // num_kv_heads,
            block_size,
            head_dim,
            sliding_window,
            soft_cap,
        )

    def __repr__(self) -> str:
        kind = type(self)
        derived = [name for name in dir(kind) if isinstance(getattr(kind, name), property)]
        names = [*(field.name for field in fields(self)), *derived]
        return f"AttentionShape({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group

    @property
    def dims(self) -> tl.constexpr:
        """The power of two that holds a head, and an int4 group: tiles have no other sizes, and products none below 16.

        Kernels have it in lists of sizes, where Triton before 3.9 takes no plain integer.
        """
        return tl.constexpr(max(GROUP if "int4" in self.row_forms else 16, int(triton.next_power_of_2(self.head_dim))))

    @property
    def has_open_keys(self) -> bool:
        return self.form.has_open_keys

    @property
    def row_forms(self) -> tuple[str, str]:
        """Of keys and of values, as `kv_rows.py` and `kv_quantize.py` name them."""
        return row_forms(self.form)

    @property
    def records(self) -> tuple[int, int]:
        """Elements of each plane that hold one block of one head: bytes of a quantized form, else numbers."""
        itemsize = 1 if self.form.dtype is None else self.form.dtype.itemsize
        keys, values = (self.form.record_bytes(plane, self.block_size, self.head_dim) // itemsize for plane in range(2))
        return keys, values

    @property
    def product_dtype(self) -> torch.dtype:
        """What products are taken in."""
        return self.form.dtype or self.dtype

    @property
    def product_type(self) -> tl.dtype:
        """The same, as kernels name it."""
        return _TRITON_DTYPES[self.product_dtype]

    @property
    def pointer_types(self) -> dict[str, str]:
        """Argument of the kernels → Triton's type, of queries, output, planes and pages."""
        plane = "*" + TRITON_TYPES[self.form.dtype or torch.uint8]
        query = "*" + TRITON_TYPES[self.dtype]
        pages = "*bf16" if self.has_open_keys else plane
        return {
            "output_ptr": query,
            "query_ptr": query,
            "keys_ptr": plane,
            "values_ptr": plane,
            "open_keys_ptr": pages,
        }


def row_forms(form: KVForm) -> tuple[str, str]:
    """Of keys and of values: "float", or the name of a form of rows."""
    if form.dtype is not None:
        return "float", "float"
    keys, values = form.rows
    return keys.name, values.name


def short_launch(arch: int, shape: AttentionShape, rows: int) -> Launch:
    """Of tiles that hold all queries of a sequence: `rows` with all heads of a group."""
    return launch_for("attention.short", arch, rows=rows, **_sizes(shape))


def chunk_launch(arch: int, shape: AttentionShape) -> Launch:
    """Of tiles of longer sequences."""
    return launch_for("attention.chunk", arch, **_sizes(shape))


def _sizes(shape: AttentionShape) -> dict[str, int]:
    return {
        "group": shape.group,
        "row_bytes": shape.dims.value * shape.product_dtype.itemsize,
        "is_quantized": int(shape.form.dtype is None),
        "has_open_keys": int(shape.form.has_open_keys),
    }


def llama_8b(arch: int) -> dict[str, AttentionShape]:
    """Llama 3 8B, by form of the cache, in the dtype that such a card is served in."""
    return {
        name: AttentionShape(form.dtype or native_dtype(arch), form, **_LLAMA_8B)
        for name, form in FORMS.items()
        if name != "float32" and not (name == "bf16" and arch in WITHOUT_BFLOAT16)
    }


def other_models(arch: int) -> dict[str, AttentionShape]:
    """Models whose attention is another one than Llama's, by name and form; int4 where it is tightest.

    None on Turing, where products take another way, and each of these variants minutes to compile.
    """
    if arch in WITHOUT_MATRIX_INSTRUCTIONS:
        return {}
    native = native_dtype(arch)
    return {
        f"{name}.{form.name}": AttentionShape(native, form, **sizes)
        for name, sizes in _OTHERS.items()
        for form in (form_of(native), FORMS["int8"], FORMS["int4"])
        if form != FORMS["int4"] or sizes["head_dim"] == 256
    }


def native_dtype(arch: int) -> torch.dtype:
    """What activations are on such a card, where nobody says otherwise."""
    return torch.float16 if arch in WITHOUT_BFLOAT16 else torch.bfloat16


_LLAMA_8B: dict[str, Any] = {"num_kv_heads": 8, "group": 4, "block_size": 16, "head_dim": 128}
_GEMMA_2_9B: dict[str, Any] = {"num_kv_heads": 8, "group": 2, "block_size": 16, "head_dim": 256, "soft_cap": 50.0}
_OTHERS: dict[str, dict[str, Any]] = {
    "gemma_2": _GEMMA_2_9B,
    "gemma_2_window": _GEMMA_2_9B | {"sliding_window": 4096},  # every other layer
    "qwen_2_7b": {"num_kv_heads": 4, "group": 7, "block_size": 16, "head_dim": 128},
    "phi_3_mini": {"num_kv_heads": 32, "group": 1, "block_size": 16, "head_dim": 96, "sliding_window": 2047},
}
