"""Compiles what a model needs on this machine's card, before it serves. Triton keeps the result in its cache on disk.

A kernel is compiled when it is first launched with constants that are new, which would stop every sequence for a second
in the middle of serving. So each is launched here once for every choice that a step can make: small numbers of rows,
large ones, splits. What is computed is thrown away. Knows which operations a model has, and no weight of it.
"""

from dataclasses import dataclass

import torch

from pagedd.kernels.kv_form import KVForm
from pagedd.kernels.layout import KVLayer, QuantizedLayer, has_open_keys
from pagedd.kernels.packed_weight import GROUP, PackedWeight
from pagedd.kernels.triton.close_blocks import close_blocks
from pagedd.kernels.triton.linear import packed_linear
from pagedd.kernels.triton.paged_attention import paged_attention
from pagedd.kernels.triton.rms_norm import add_rms_norm, rms_norm
from pagedd.kernels.triton.rope_kv import apply_rope, rope_and_write_kv, write_kv
from pagedd.kernels.triton.silu_and_mul import silu_and_mul
from pagedd.kernels.triton.top_k_top_p import keep_best

_NUM_GUESSES = (1, 2, 4, 8)  # rows of a sequence that decodes, its guesses included
_CHUNK_ROWS = 64  # of a prefill chunk: too many for a short sequence's tile


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What kernels depend on.

    Attributes:
        dtype: of the activations.
        kv_form: of the cache.
        weight_bits: 4 or 8 where the weights are quantized; `None` leaves products to torch.
        max_num_rows: token budget of a step.
        max_context_len: tokens of the longest sequence.
        has_head_norms: queries and keys are normalised, each head by itself.
        sliding_windows: of its layers, `None` for those without.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    block_size: int
    dtype: torch.dtype
    kv_form: KVForm
    weight_bits: int | None
    max_num_rows: int
    max_context_len: int
    has_head_norms: bool = False
    sliding_windows: frozenset[int | None] = frozenset({None})
    soft_cap: float | None = None


@dataclass(frozen=True, eq=False)
class _Batch:
    """Sequences that all read block 0. Satisfies `kernels.layout.PagedBatch`."""

    query_starts: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    max_query_len: int
    max_context_len: int
    num_decodes: int
    open_slots: torch.Tensor
    open_tables: torch.Tensor


def compile_kernels(model: ModelSizes, device: torch.device) -> bool:
    """Compiles every kernel that `model` will launch on `device`. False, and nothing is done, if that is no GPU.

    Takes a minute at first, and as long as loading them afterwards. Needs memory for the largest weight once.
    """
    if device.type != "cuda":
        return False
    with torch.cuda.device(device), torch.inference_mode():
        launch_all(model, device)
        torch.cuda.synchronize(device)
    return True


def launch_all(model: ModelSizes, device: torch.device) -> None:
    """Every kernel, once for each choice of its constants."""
    _launch_row_kernels(model, device)
    if model.weight_bits is not None:
        _launch_products(model, model.weight_bits, device)
    kv_layer = _empty_layer(model, device)
    _launch_cache_writers(model, kv_layer, device)
    for sliding_window in model.sliding_windows:
        _launch_attention(model, kv_layer, sliding_window, device)
    logits = torch.zeros(1, model.vocab_size, device=device)
    shares = torch.full((1,), 0.9, dtype=torch.float64, device=device)
    keep_best(logits, torch.ones_like(logits, dtype=torch.int64), torch.ones_like(shares, dtype=torch.int64), shares)


def _launch_row_kernels(model: ModelSizes, device: torch.device) -> None:
    x = torch.zeros(1, model.hidden_size, dtype=model.dtype, device=device)
    rms_norm(x, x[0], 1e-5)
    add_rms_norm(x, x, x[0], 1e-5)
    if model.has_head_norms:
        query, key, _ = _query_key_value(model, 1, device)
        rms_norm(query, query[0, 0], 1e-5)
        rms_norm(key, key[0, 0], 1e-5)
    silu_and_mul(torch.zeros(1, 2 * model.intermediate_size, dtype=model.dtype, device=device))


def _launch_products(model: ModelSizes, bits: int, device: torch.device) -> None:
    """Of every weight's shape with every power of two of rows: among them are all tiles, split and whole."""
    row_counts = [1 << power for power in range(model.max_num_rows.bit_length())]
    attention_size = model.num_heads * model.head_dim
    shapes = {
        (attention_size + 2 * model.num_kv_heads * model.head_dim, model.hidden_size),
        (model.hidden_size, attention_size),
        (2 * model.intermediate_size, model.hidden_size),
        (model.hidden_size, model.intermediate_size),
        (model.vocab_size, model.hidden_size),
    }
    for out_features, in_features in shapes:
        words = torch.zeros(out_features, in_features * bits // 32, dtype=torch.int32, device=device)
        scales = torch.zeros(out_features, in_features // GROUP, dtype=torch.int32, device=device)
        weight = PackedWeight(bits, out_features, in_features, words, scales)
        for num_rows in row_counts:
            packed_linear(torch.zeros(num_rows, in_features, dtype=model.dtype, device=device), weight, None)


def _launch_cache_writers(model: ModelSizes, kv_layer: KVLayer, device: torch.device) -> None:
    query, key, value = _query_key_value(model, 1, device)
    cos, sin = torch.zeros(2, 1, model.head_dim // 2, device=device)
    slot = torch.zeros(1, dtype=torch.int64, device=device)
    apply_rope(query, cos, sin)
    write_kv(key, value, kv_layer, slot, slot)
    rope_and_write_kv(query, key, value, cos, sin, kv_layer, slot, slot)
    if has_open_keys(kv_layer):
        close_blocks(kv_layer, _make_batch([1], 1, model.block_size, device))


def _launch_attention(model: ModelSizes, kv_layer: KVLayer, sliding_window: int | None, device: torch.device) -> None:
    """Decodes with and without guesses, short and long contexts, chunks alone and chunks beside decodes."""
    context_lens = {model.block_size, model.max_context_len}
    steps = [([num_rows], context_len) for num_rows in _NUM_GUESSES for context_len in context_lens]
    steps += [(rows, context_len) for rows in ([_CHUNK_ROWS], [1, _CHUNK_ROWS]) for context_len in context_lens]
    for query_lens, context_len in steps:
        batch = _make_batch(query_lens, max(context_len, *query_lens), model.block_size, device)
        query, _, _ = _query_key_value(model, sum(query_lens), device)
        paged_attention(
            query,
            kv_layer,
            batch,
            scale=model.head_dim**-0.5,
            sliding_window=sliding_window,
            soft_cap=model.soft_cap,
        )


def _make_batch(query_lens: list[int], max_context_len: int, block_size: int, device: torch.device) -> _Batch:
    """The contexts are no longer than the queries; only the launch is made for `max_context_len`."""
    starts = [sum(query_lens[:i]) for i in range(len(query_lens) + 1)]
    tables = torch.zeros(len(query_lens), -(-max_context_len // block_size), dtype=torch.int32, device=device)
    return _Batch(
        query_starts=torch.tensor(starts, dtype=torch.int32, device=device),
        context_lens=torch.tensor(query_lens, dtype=torch.int32, device=device),
        block_tables=tables,
        slot_mapping=torch.zeros(starts[-1], dtype=torch.int64, device=device),
        max_query_len=max(query_lens),
        max_context_len=max_context_len,
        num_decodes=sum(query_len == 1 for query_len in query_lens),
        open_slots=torch.zeros(starts[-1], dtype=torch.int64, device=device),
        open_tables=torch.zeros_like(tables),
    )


def _query_key_value(
    model: ModelSizes, num_rows: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views into one row, as a decoder's product gives them."""
    sizes = [model.num_heads, model.num_kv_heads, model.num_kv_heads]
    heads = torch.zeros(num_rows, sum(sizes), model.head_dim, dtype=model.dtype, device=device)
    query, key, value = heads.split(sizes, dim=1)
    return query, key, value


def _empty_layer(model: ModelSizes, device: torch.device) -> KVLayer:
    """A cache of one block."""
    form, head_dim = model.kv_form, model.head_dim
    if form.dtype is not None:
        shape = (2, 1, model.num_kv_heads, model.block_size, head_dim)
        return torch.zeros(shape, dtype=form.dtype, device=device)
    return QuantizedLayer.filled(form, 1, model.num_kv_heads, model.block_size, head_dim, device=device, num_pages=1)
