"""Paged batches made of random numbers, for every backend's tests."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from pagedd.kernels.kv_form import FORMS
from pagedd.kernels.layout import KVLayer, QuantizedLayer


@dataclass(frozen=True, eq=False)
class Paged:
    """Satisfies `kernels.layout.PagedBatch`, and carries the tensors that go with it."""

    query: torch.Tensor
    kv_layer: KVLayer
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    max_query_len: int
    max_context_len: int
    num_decodes: int


def make_paged(
    lens: list[tuple[int, int]],  # (query rows, context) of each sequence
    *,
    block_size: int = 4,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 8,
    dtype: torch.dtype = torch.float32,
    form: str | None = None,
    seed: int = 0,
) -> Paged:
    """Blocks are scattered over the pool, and every slot that no sequence wrote holds NaN.

    `dtype` is that of query and cache; a `form` is that of the cache instead, quantized from float32.
    """
    if form is not None and FORMS[form].dtype is not None:
        dtype, form = FORMS[form].dtype, None
    generator = torch.Generator().manual_seed(seed)
    query_lens, contexts = [q for q, _ in lens], [c for _, c in lens]
    num_blocks = [-(-c // block_size) for c in contexts]
    order = torch.randperm(sum(num_blocks) + 2, generator=generator).tolist()
    tables = torch.zeros(len(lens), max(num_blocks), dtype=torch.int32)
    kv_layer = torch.full((2, len(order), num_kv_heads, block_size, head_dim), float("nan"), dtype=dtype)
    slots: list[int] = []
    for i, (query_len, context) in enumerate(lens):
        table = [order.pop() for _ in range(num_blocks[i])]
        tables[i, : len(table)] = torch.tensor(table, dtype=torch.int32)
        for j in range(context):
            kv = torch.randn(2, num_kv_heads, head_dim, generator=generator)
            kv_layer[:, table[j // block_size], :, j % block_size] = kv.to(dtype)
        slots += [table[j // block_size] * block_size + j % block_size for j in range(context - query_len, context)]
    return Paged(
        query=torch.randn(sum(query_lens), num_heads, head_dim, generator=generator).to(dtype),
        kv_layer=kv_layer if form is None else quantize_layer(kv_layer, form),
        query_starts=torch.tensor([0, *torch.tensor(query_lens).cumsum(0)], dtype=torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        block_tables=tables,
        slot_mapping=torch.tensor(slots),
        max_query_len=max(query_lens),
        max_context_len=max(contexts),
        num_decodes=next((i for i, q in enumerate(query_lens) if q != 1), len(lens)),
    )


def quantize_layer(kv_layer: torch.Tensor, form: str) -> QuantizedLayer:
    """A float layer in a quantized form; padding holds what a careless read would show."""
    layer = QuantizedLayer.filled(FORMS[form], *kv_layer.shape[1:], byte=0xFF)
    for plane in range(2):
        values, scales = layer.form.rows[plane].quantize(kv_layer[plane])
        layer.values(plane).copy_(values)
        layer.scales(plane).copy_(scales)
    return layer


@pytest.fixture(scope="session")
def paged() -> Callable[..., Paged]:
    return make_paged
