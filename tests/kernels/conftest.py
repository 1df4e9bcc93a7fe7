"""Paged batches made of random numbers, for every backend's tests."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch


@dataclass(frozen=True, eq=False)
class Paged:
    """Satisfies `kernels.layout.PagedBatch`, and carries the tensors that go with it."""

    query: torch.Tensor
    kv_layer: torch.Tensor
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
    seed: int = 0,
) -> Paged:
    """Blocks are scattered over the pool, and every slot that no sequence wrote holds NaN."""
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
        kv_layer=kv_layer,
        query_starts=torch.tensor([0, *torch.tensor(query_lens).cumsum(0)], dtype=torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        block_tables=tables,
        slot_mapping=torch.tensor(slots),
        max_query_len=max(query_lens),
        max_context_len=max(contexts),
        num_decodes=next((i for i, q in enumerate(query_lens) if q != 1), len(lens)),
    )


@pytest.fixture(scope="session")
def paged() -> Callable[..., Paged]:
    return make_paged
