"""The forms in which a KV cache holds numbers, and what they take.

The float forms hold rows as they are. A quantized one is a form of rows (`row_form.py`) for keys and one for values:

    int8, fp8   the same for both
    k8v4        keys in int8, values in int4: values bear rounding better, since attention averages them
    int4        keys in channel4, values in int4

A block's rows of one head, of its keys or of its values, lie together in a *record*: block_size rows of values, then
those of scales, padded to whole cache lines.

Keys in channel4 wait, as bfloat16, in a *page* beside the cache until their block is full. Whatever a step computes
together, a query at position p sees the keys of its own block, p // block_size, as bfloat16, and those of the blocks
before it as quantized: what was full at p. So neither chunks nor neighbours nor cached prefixes change a number. Knows
nothing of blocks' owners.
"""

from dataclasses import dataclass

import torch

from pagedd.kernels.row_form import RowForm

_LINE = 64  # bytes


@dataclass(frozen=True, slots=True)
class KVForm:
    """One of `FORMS`.

    Attributes:
        name: as in the flag `--kv-cache-dtype`.
        dtype: of a float form; `None` of a quantized one.
        rows: of a quantized form, that of keys and that of values.
    """

    name: str
    dtype: torch.dtype | None = None
    rows: tuple[RowForm, ...] = ()

    @property
    def has_open_keys(self) -> bool:
        """Whether keys wait in 16 bits until their block is full."""
        return bool(self.rows) and self.rows[0].needs_whole_block

    def fits(self, head_dim: int) -> bool:
        """Rows of bytes are read in words of four."""
        return self.dtype is not None or head_dim % 4 == 0

    def record_bytes(self, plane: int, block_size: int, head_dim: int) -> int:
        """Of one block, for keys (`plane` 0) or values (1) of one head of one layer; padding included."""
        if self.dtype is not None:
            return block_size * head_dim * self.dtype.itemsize
        rows = self.rows[plane]
        num_bytes = block_size * rows.value_bytes(head_dim)
        num_bytes += rows.num_scale_rows(block_size) * rows.scale_bytes(head_dim)
        return -(-num_bytes // _LINE) * _LINE

    def block_bytes(self, block_size: int, head_dim: int) -> int:
        """Of one block, keys and values of one head of one layer."""
        return sum(self.record_bytes(plane, block_size, head_dim) for plane in range(2))

    def page_bytes(self, block_size: int, head_dim: int) -> int:
        """Of one open block's keys of one head of one layer."""
        return block_size * head_dim * torch.bfloat16.itemsize if self.has_open_keys else 0

    def gathered_bytes(self, itemsize: int) -> int:
        """Upper bound on what attention over gathered blocks holds for one key's and one value's number together.

        Of a quantized form one of the two is being dequantized: as it was read, as float32, and as the product.

        Args:
            itemsize: bytes of a number in the dtype that products are taken in.
        """
        return 2 * itemsize if self.dtype is not None else 2 * itemsize + 10


def _quantized(name: str, keys: str, values: str) -> KVForm:
    return KVForm(name, rows=(RowForm(keys), RowForm(values)))


FORMS = {
    form.name: form
    for form in (
        KVForm("float32", torch.float32),
        KVForm("bf16", torch.bfloat16),
        KVForm("fp16", torch.float16),
        _quantized("int8", "int8", "int8"),
        _quantized("fp8", "fp8", "fp8"),
        _quantized("k8v4", "int8", "int4"),
        _quantized("int4", "channel4", "int4"),
    )
}


def form_of(dtype: torch.dtype) -> KVForm:
    """The float form that holds `dtype` as it is."""
    return next(form for form in FORMS.values() if form.dtype == dtype)
