"""Paged batches made of random numbers, for every backend's tests, and the C++ of attention without torch."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from pagedd.kernels.kv_form import FORMS
from pagedd.kernels.layout import KVLayer, QuantizedLayer

from .attention_driver import FLAGS, Driver, compile_driver


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
    open_slots: torch.Tensor
    open_tables: torch.Tensor


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
    # Every block that a sequence's rows are in has a page, and no two are neighbours.
    firsts = [(c - q) // block_size for q, c in lens]
    num_pages = sum(n - first for n, first in zip(num_blocks, firsts, strict=True))
    pages = torch.randperm(2 * num_pages + 1, generator=generator).tolist()
    open_tables = torch.zeros(len(lens), max(n - f for n, f in zip(num_blocks, firsts, strict=True)), dtype=torch.int32)
    open_slots: list[int] = []
    for i, (query_len, context) in enumerate(lens):
        for column in range(num_blocks[i] - firsts[i]):
            open_tables[i, column] = pages.pop()
        for j in range(context - query_len, context):
            open_slots.append(int(open_tables[i, j // block_size - firsts[i]]) * block_size + j % block_size)
    layer: KVLayer = kv_layer
    if form is not None:
        layer = quantize_layer(kv_layer, form, 2 * num_pages + 1)
        for table, opened, n, first in zip(tables, open_tables, num_blocks, firsts, strict=True):
            if layer.form.has_open_keys:
                layer.open_keys[opened[: n - first].long()] = kv_layer[0, table[first:n].long()].bfloat16()
    return Paged(
        query=torch.randn(sum(query_lens), num_heads, head_dim, generator=generator).to(dtype),
        kv_layer=layer,
        query_starts=torch.tensor([0, *torch.tensor(query_lens).cumsum(0)], dtype=torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        block_tables=tables,
        slot_mapping=torch.tensor(slots),
        max_query_len=max(query_lens),
        max_context_len=max(contexts),
        num_decodes=next((i for i, q in enumerate(query_lens) if q != 1), len(lens)),
        open_slots=torch.tensor(open_slots),
        open_tables=open_tables,
    )


def quantize_layer(kv_layer: torch.Tensor, form: str, num_pages: int) -> QuantizedLayer:
    """A float layer in a quantized form; padding holds what a careless read would show."""
    layer = QuantizedLayer.filled(FORMS[form], *kv_layer.shape[1:], byte=0xFF, num_pages=num_pages)
    for plane in range(2):
        rows = layer.form.rows[plane]
        values, scales = rows.quantize(kv_layer[plane].bfloat16() if rows.needs_whole_block else kv_layer[plane])
        layer.values(plane).copy_(values)
        layer.scales(plane).copy_(scales)
    return layer


@pytest.fixture(scope="session")
def paged() -> Callable[..., Paged]:
    return make_paged


@pytest.fixture(scope="session", params=list(FLAGS))
def driver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Driver:
    """The C++ of attention, on either code path."""
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    return compile_driver(request.param, tmp_path_factory.mktemp("attention"))
