"""Random inputs for the kernels, of any size, on any device."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from pagedd.kernels.kv_form import FORMS
from pagedd.kernels.layout import KVLayer, QuantizedLayer
from pagedd.kernels.packed_weight import PackedWeight, pack_nested_weight, pack_weight


@dataclass(frozen=True, eq=False)
class PagedInputs:
    """A `kernels.layout.PagedBatch` with what belongs to it: shapes as in `kernels/ops.py`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    kv_layer: KVLayer
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    max_query_len: int
    max_context_len: int
    num_decodes: int
    open_slots: torch.Tensor
    open_tables: torch.Tensor

    def to(self, device: torch.device) -> "PagedInputs":
        moved = {name: part.to(device) for name, part in vars(self).items() if isinstance(part, torch.Tensor)}
        layer = self.kv_layer
        if isinstance(layer, QuantizedLayer):
            keys, values = (plane.to(device) for plane in layer.planes)
            open_keys = layer.open_keys.to(device)
            moved["kv_layer"] = replace(layer, planes=(keys, values), open_keys=open_keys)  # type: ignore[assignment]
        return replace(self, **moved)  # type: ignore[arg-type]


def forms_beside(dtype: torch.dtype) -> list[str]:
    """Forms of the cache for activations of that dtype: a card that is served in float16 has no bfloat16."""
    without = {torch.float16: {"float32", "bf16"}}.get(dtype, {"float32"})
    return [form for form in FORMS if form not in without]


def on_cpu(inputs: PagedInputs) -> PagedInputs:
    return inputs.to(torch.device("cpu"))


def make_inputs(
    lens: list[tuple[int, int]],  # (new tokens, context with them) of each sequence; single ones first
    form: str,
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    num_heads: int = 8,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    device: torch.device | None = None,
    fill: bool = True,
) -> PagedInputs:
    """Blocks in random order. With `fill` every key and value is drawn, the rest of the pool is NaN or 0xff.

    Without it the pool is drawn on the device itself, where it may be many GiB, and quickly.
    """
    device = device or torch.device("cpu")
    num_blocks = [-(-context // block_size) for _, context in lens]
    order = torch.randperm(sum(num_blocks), generator=generator).tolist()
    tables = torch.zeros(len(lens), max(num_blocks), dtype=torch.int32)
    slots: list[int] = []
    for i, (query_len, context) in enumerate(lens):
        table = [order.pop() for _ in range(num_blocks[i])]
        tables[i, : len(table)] = torch.tensor(table, dtype=torch.int32)
        slots += [table[j // block_size] * block_size + j % block_size for j in range(context - query_len, context)]
    # Every block has a page of its own number, for forms with open keys.
    first_blocks = [(context - query_len) // block_size for query_len, context in lens]
    open_tables = torch.zeros_like(tables)
    for i, first in enumerate(first_blocks):
        open_tables[i, : num_blocks[i] - first] = tables[i, first : num_blocks[i]]
    query_lens = [query_len for query_len, _ in lens]
    num_tokens = sum(query_lens)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    angles = torch.rand(num_tokens, head_dim // 2, generator=generator) * 6
    layer = _layer((2, sum(num_blocks), num_kv_heads, block_size, head_dim), form, device if not fill else None)
    inputs = PagedInputs(
        query=draw(num_tokens, num_heads, head_dim),
        key=draw(num_tokens, num_kv_heads, head_dim),
        value=draw(num_tokens, num_kv_heads, head_dim),
        cos=angles.cos(),
        sin=angles.sin(),
        kv_layer=layer,
        query_starts=torch.tensor([0, *torch.tensor(query_lens).cumsum(0)], dtype=torch.int32),
        context_lens=torch.tensor([context for _, context in lens], dtype=torch.int32),
        block_tables=tables,
        slot_mapping=torch.tensor(slots),
        max_query_len=max(query_lens),
        max_context_len=max(context for _, context in lens),
        num_decodes=next((i for i, count in enumerate(query_lens) if count != 1), len(lens)),
        open_slots=torch.tensor(slots),
        open_tables=open_tables,
    )
    return _fill_contexts(inputs, lens, generator) if fill else inputs.to(device)


def _layer(shape: tuple[int, ...], form: str, device: torch.device | None) -> KVLayer:
    """Poisoned for `None`, else drawn on `device`."""
    _, num_blocks, num_kv_heads, block_size, head_dim = shape
    kv_form = FORMS[form]
    if kv_form.dtype is not None:
        if device is None:
            return torch.full(shape, float("nan"), dtype=kv_form.dtype)
        return torch.empty(shape, dtype=kv_form.dtype, device=device).normal_()
    layer = QuantizedLayer.filled(kv_form, num_blocks, num_kv_heads, block_size, head_dim, 0xFF, device, num_blocks)
    if device is not None:
        layer.open_keys.normal_()
        for plane in range(2):
            layer.values(plane).random_(0, 0x70)  # finite in every form
            layer.scales(plane).view(torch.int16).fill_(0x3C00)  # 2⁻⁷ as bfloat16
    return layer


def _fill_contexts(inputs: PagedInputs, lens: list[tuple[int, int]], generator: torch.Generator) -> PagedInputs:
    """Writes what came before each sequence's new tokens."""
    from pagedd.kernels import reference

    layer = inputs.kv_layer
    block_size = layer.block_size if isinstance(layer, QuantizedLayer) else layer.shape[3]
    _, num_kv_heads, head_dim = inputs.key.shape
    for table, (query_len, context) in zip(inputs.block_tables.tolist(), lens, strict=True):
        slots = [table[j // block_size] * block_size + j % block_size for j in range(context - query_len)]
        key, value = torch.randn(2, len(slots), num_kv_heads, head_dim, generator=generator)
        at = torch.tensor(slots, dtype=torch.int64)
        reference.write_kv(key, value, layer, at, at)
        if isinstance(layer, QuantizedLayer) and layer.form.has_open_keys:
            full = torch.tensor(table[: len(slots) // block_size], dtype=torch.int64)
            layer.close(full, full)
    return inputs


def random_weight(
    out_features: int, in_features: int, bits: int, device: torch.device, generator: torch.Generator
) -> PackedWeight:
    """Numbers around 0, as a layer's are."""
    q = torch.randint(0, 1 << bits, (out_features, in_features), generator=generator, dtype=torch.uint8).to(device)
    scale = (0.5 + torch.rand(out_features, in_features // 32, generator=generator)).half().to(device) / (1 << bits)
    return pack_weight(q, scale, scale * -(1 << bits - 1), bits)


def random_nested_weight(
    out_features: int, in_features: int, bits: int, group: int, device: torch.device, generator: torch.Generator
) -> PackedWeight:
    """As a K-quant has it."""

    def draw(high: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(0, high, (out_features, columns), generator=generator, dtype=dtype).to(device)

    q, s = draw(1 << bits, in_features, torch.uint8), draw(64, in_features // group, torch.int8)
    d = (0.5 + torch.rand(out_features, in_features // 256, generator=generator)).half().to(device) / (64 << bits)
    return pack_nested_weight(q, s, s, d, d * (1 << bits - 1), bits)


@contextmanager
def poisoned() -> Iterator[None]:
    """New tensors hold NaN until they are written."""
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was)
