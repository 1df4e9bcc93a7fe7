"""What the attention kernels share: a tile of queries, and its way over the keys in blocks of the cache.

The query heads that share a KV head are rows of one tile, row r being head r mod group of query r div group, so a key
is read once for all of them, and the tile is high enough for matrix instructions. With s the scores in units of log₂ e,

    m = max s,   p = 2^(s − m),   l = Σ p,   o = Σ p · v

are brought up to date with each tile of keys (online softmax: Milakov and Gimelshein 2018; Dao et al. 2022), in
float32. `SHAPE` is an `AttentionShape`. Knows nothing of how tiles are shared out: see `paged_attention.py` and
`split_decode.py`.
"""

import triton
import triton.language as tl

from pagedd.kernels.triton.kv_rows import find_blocks, load_open_keys, load_rows
from pagedd.kernels.triton.products import dot

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def place_queries(
    query_starts_ptr,  # [num_seqs + 1] int32
    context_lens_ptr,  # [num_seqs] int32
    seq,
    first_query,  # of the tile, counted within the sequence
    ROWS: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Where a tile's rows [ROWS] belong, and what they see together.

    Returns:
        Of each row: its row of the batch, the head within its group, the position, whether there is such a row.
        Of the tile: the position of its first query, and the end of its keys, which is 0 where it has no query.
    """
    query_start = tl.load(query_starts_ptr + seq)
    query_len = tl.load(query_starts_ptr + seq + 1) - query_start
    start = tl.load(context_lens_ptr + seq) - query_len  # position of the sequence's first query
    rows = tl.arange(0, ROWS)
    queries = first_query + rows // SHAPE.group
    end_query = tl.minimum(first_query + ROWS // SHAPE.group, query_len)
    end_key = tl.where(first_query < end_query, start + end_query, 0)
    return (
        query_start + queries,
        rows % SHAPE.group,
        start + queries,
        queries < end_query,
        start + first_query,
        end_key,
    )


@triton.jit
def load_queries(
    query_ptr,  # [num_tokens, num_heads, head_dim]
    query_stride,
    batch_rows,  # [ROWS]
    heads,  # [ROWS]
    is_row,  # [ROWS]
    SHAPE: tl.constexpr,
):
    """[ROWS, dims] in the dtype of products."""
    dims = tl.arange(0, SHAPE.dims)
    starts = batch_rows.to(tl.int64) * query_stride + heads * SHAPE.head_dim
    is_number = is_row[:, None] & (dims < SHAPE.head_dim)[None, :]
    return tl.load(query_ptr + starts[:, None] + dims[None, :], mask=is_number, other=0).to(SHAPE.product_type)


@triton.jit
def store_rows(
    output_ptr,  # [num_tokens, num_heads, head_dim]
    output,  # [ROWS, dims]
    batch_rows,  # [ROWS]
    heads,  # [ROWS]
    is_row,  # [ROWS]
    SHAPE: tl.constexpr,
):
    dims = tl.arange(0, SHAPE.dims)
    starts = (batch_rows.to(tl.int64) * SHAPE.num_heads + heads) * SHAPE.head_dim
    is_number = is_row[:, None] & (dims < SHAPE.head_dim)[None, :]
    tl.store(output_ptr + starts[:, None] + dims[None, :], output, mask=is_number)


@triton.jit
def first_visible(position, SHAPE: tl.constexpr):
    """The oldest key that a query at `position` sees."""
    return tl.maximum(position - SHAPE.sliding_window + 1, 0) if SHAPE.sliding_window is not None else 0


@triton.jit
def see_nothing(ROWS: tl.constexpr, SHAPE: tl.constexpr):
    """The state before the first key: o [ROWS, dims], l [ROWS], m [ROWS]."""
    return (
        tl.zeros([ROWS, SHAPE.dims], tl.float32),
        tl.zeros([ROWS], tl.float32),
        tl.full([ROWS], float("-inf"), tl.float32),
    )


@triton.jit
def first_open_block(query_starts_ptr, context_lens_ptr, seq, SHAPE: tl.constexpr):
    """The block of the sequence's first query: the first that has a page."""
    query_len = tl.load(query_starts_ptr + seq + 1) - tl.load(query_starts_ptr + seq)
    return (tl.load(context_lens_ptr + seq) - query_len) // SHAPE.block_size


@triton.jit
def see_keys(
    output,
    total,
    peak,
    query,
    positions,
    first_position,  # of the tile's first query
    first_key,
    end_key,
    keys_ptr,
    values_ptr,
    table_ptr,
    open_keys_ptr,  # [num_pages, num_kv_heads, block_size, head_dim]; not read unless the form has open keys
    open_table_ptr,  # [max_num_pages] int32, of the sequence
    first_block,  # whose page comes first there
    kv_head,
    scale,
    KEYS: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """The state after the keys [first_key, end_key), as far as each row sees them. Arguments as in `see_some_keys`."""
    if SHAPE.has_open_keys:
        # A row sees keys of its own block in its page, and those before as they were quantized.
        own = first_position // SHAPE.block_size * SHAPE.block_size
        end_closed = tl.minimum((tl.max(positions, axis=0)) // SHAPE.block_size * SHAPE.block_size, end_key)
        output, total, peak = see_some_keys(
            output,
            total,
            peak,
            query,
            positions // SHAPE.block_size * SHAPE.block_size - 1,
            positions,
            first_key,
            end_closed,
            keys_ptr,
            values_ptr,
            table_ptr,
            open_keys_ptr,
            open_table_ptr,
            first_block,
            kv_head,
            scale,
            KEYS,
            True,
            False,
            SHAPE,
        )
        first_key = tl.maximum(first_key, own)
    return see_some_keys(
        output,
        total,
        peak,
        query,
        positions,
        positions,
        first_key,
        end_key,
        keys_ptr,
        values_ptr,
        table_ptr,
        open_keys_ptr,
        open_table_ptr,
        first_block,
        kv_head,
        scale,
        KEYS,
        True,
        SHAPE.has_open_keys,
        SHAPE,
    )


@triton.jit
def see_some_keys(
    output,  # o [ROWS, dims], l and m [ROWS] so far
    total,
    peak,
    query,  # [ROWS, dims]
    last_seen,  # [ROWS], the newest key that each row may see here
    positions,  # [ROWS]
    first_key,
    end_key,  # all keys before it are written; without a mask, whole tiles end there
    keys_ptr,  # planes of the layer: [num_blocks, num_kv_heads, block_size, head_dim], or records
    values_ptr,
    table_ptr,  # [max_num_blocks] int32, of the sequence
    open_keys_ptr,
    open_table_ptr,
    first_block,
    kv_head,
    scale,
    KEYS: tl.constexpr,  # of one tile
    IS_MASKED: tl.constexpr,  # whether there may be a row that does not see each of them
    IS_OPEN: tl.constexpr,  # only keys of each row's own block, out of its page
    SHAPE: tl.constexpr,
):
    """The state after the keys [first_key, end_key)."""
    DTYPE: tl.constexpr = SHAPE.product_type
    for start in range(first_key, end_key, KEYS):
        keys = start + tl.arange(0, KEYS)
        is_there = keys < end_key if IS_MASKED else tl.full([KEYS], True, tl.int1)
        blocks = find_blocks(table_ptr, keys, is_there, kv_head, SHAPE)
        offsets = keys % SHAPE.block_size
        if IS_OPEN:
            key = load_open_keys(open_keys_ptr, open_table_ptr, first_block, keys, is_there, kv_head, SHAPE)
        else:
            key = load_rows(keys_ptr, blocks, offsets, is_there, 0, SHAPE)
        scores = dot(query, tl.trans(key), tl.zeros([query.shape[0], KEYS], tl.float32))
        if SHAPE.soft_cap is not None:
            scores = _tanh(scores * (scale / SHAPE.soft_cap)) * (SHAPE.soft_cap * _LOG2_E)
        else:
            scores *= scale * _LOG2_E
        if IS_MASKED:
            is_visible = is_there[None, :] & (keys[None, :] <= last_seen[:, None])
            if IS_OPEN:
                is_visible &= (keys // SHAPE.block_size)[None, :] == (positions // SHAPE.block_size)[:, None]
            if SHAPE.sliding_window is not None:
                is_visible &= keys[None, :] > (positions - SHAPE.sliding_window)[:, None]
            scores = tl.where(is_visible, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        # Of a row that has seen no key yet: −∞ − −∞ would be NaN.
        level = tl.where(new_peak == float("-inf"), 0.0, new_peak) if IS_MASKED else new_peak
        decay = tl.exp2(peak - level)
        weights = tl.exp2(scores - level[:, None])
        total = total * decay + tl.sum(weights, axis=1)
        value = load_rows(values_ptr, blocks, offsets, is_there, 1, SHAPE)
        output = dot(weights.to(DTYPE), value, output * decay[:, None])
        peak = new_peak
    return output, total, peak


@triton.jit
def divisor(total):
    """l, and 1 where a row saw no key, as a padded sequence's may: its o is 0."""
    return tl.where(total == 0, 1.0, total)


@triton.jit
def _tanh(x):
    return 1 - 2 / (1 + tl.exp2(x * (2 * _LOG2_E)))  # 2^… may be infinite or 0: that is 1 or −1
