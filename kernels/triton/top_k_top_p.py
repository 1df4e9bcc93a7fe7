"""Which tokens top-k and top-p leave over, without sorting a vocabulary: the cut-off is searched for.

Tokens are ordered by logit, equal ones by ascending id. Kept are the first `limit` of them, and of those the fewest
that hold at least `share` of their weight; always one. Weights are integers, so their sums depend on no order.

A program has one row. A logit's bits are an integer that sorts like the logit, and the cut-off is the largest such
integer from which on there are enough tokens, or enough weight. Each pass over the row looks at three candidates, which
divides what is left to search by four: at most 16 passes for all of 32 bits. The sum of what is certainly kept is
carried along, so weights are only read where the search still goes on. Equal logits at the cut-off are told apart in
the end, by a walk up the ids.

Moves 4 bytes of logits a token and pass, from L2 after the first, and little of 8 bytes of weights after the second.
"""

import torch
import triton
import triton.language as tl

from pagedd.kernels.triton.card import card_of
from pagedd.kernels.triton.launch import launch_for
from pagedd.kernels.triton.variant import Variant

_BELOW_ALL = tl.constexpr(-(2**31))  # the key of what is no token
_ABOVE_ALL = tl.constexpr(2**31 - 1)


@triton.jit
def _load_keys(logits_ptr, start, vocab_size, CHUNK: tl.constexpr):
    """Ids of a chunk, and integers in the order of their logits. int32; −0 is 0."""
    token = start + tl.arange(0, CHUNK)
    logits = tl.load(logits_ptr + token, mask=token < vocab_size, other=0.0)
    bits = tl.where(logits == 0, 0, logits.to(tl.int32, bitcast=True))
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return token, tl.where(token < vocab_size, keys, _BELOW_ALL)


@triton.jit
def _load_amounts(weights_ptr, token, is_asked, IS_WEIGHTED: tl.constexpr):
    """What each token counts, int64: its weight, or 1; 0 where nobody asks."""
    return tl.load(weights_ptr + token, mask=is_asked, other=0) if IS_WEIGHTED else is_asked.to(tl.int64)


@triton.jit
def _is_kept(token, keys, cut, last):
    """Above the cut-off, or at it and not past the last id."""
    return (keys > cut) | ((keys == cut) & (token <= last))


@triton.jit
def _find_cut(
    logits_ptr,
    weights_ptr,
    vocab_size,
    low,  # int64; from here on there is enough
    high,  # int64; from here on there is nothing
    wanted,  # int64, at least 1
    cut,  # with `last`: what was kept so far
    last,
    IS_WEIGHTED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The largest key from which on the amounts reach `wanted`, and the amount of what is above it."""
    above = tl.zeros([], dtype=tl.int64)  # of the keys from `high` on
    while high - low > 1:
        step = (high - low + 3) // 4
        first = low + step
        second = tl.minimum(first + step, high)
        third = tl.minimum(second + step, high)
        from_first = tl.zeros([CHUNK], dtype=tl.int64)
        from_second = tl.zeros([CHUNK], dtype=tl.int64)
        from_third = tl.zeros([CHUNK], dtype=tl.int64)
        for start in range(0, vocab_size, CHUNK):
            token, keys = _load_keys(logits_ptr, start, vocab_size, CHUNK)
            is_open = (keys >= low.to(tl.int32)) & (keys < high.to(tl.int32)) & _is_kept(token, keys, cut, last)
            amounts = _load_amounts(weights_ptr, token, is_open, IS_WEIGHTED)
            from_first += tl.where(keys >= first.to(tl.int32), amounts, 0)
            from_second += tl.where(keys >= second.to(tl.int32), amounts, 0)
            from_third += tl.where(keys >= third.to(tl.int32), amounts, 0)
        first_sum = above + tl.sum(from_first)
        second_sum = above + tl.sum(from_second)
        third_sum = above + tl.sum(from_third)
        if third_sum >= wanted:
            low = third
        elif second_sum >= wanted:
            low, high, above = second, third, third_sum
        elif first_sum >= wanted:
            low, high, above = first, second, second_sum
        else:
            high, above = first, first_sum
    return low, above


@triton.jit
def _find_last(
    logits_ptr,
    weights_ptr,
    vocab_size,
    tied,  # key
    missing,  # int64, at least 1
    cut,  # with `last`: what was kept so far
    last,
    IS_WEIGHTED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The id at which the amounts of the tokens with this key, by ascending id, reach `missing`."""
    found = vocab_size * 1
    start = vocab_size * 0
    while (missing > 0) & (start < vocab_size):
        token, keys = _load_keys(logits_ptr, start, vocab_size, CHUNK)
        is_tied = (keys == tied) & _is_kept(token, keys, cut, last)
        amounts = _load_amounts(weights_ptr, token, is_tied, IS_WEIGHTED)
        amount = tl.sum(amounts)
        if amount >= missing:
            reaches = is_tied & (tl.cumsum(amounts, axis=0) >= missing)
            found = tl.min(tl.where(reaches, token, vocab_size))
        missing -= amount
        start += CHUNK
    return found


# A step's tables may begin anywhere in a longer tensor; that must not make a kernel of its own.
@triton.jit(do_not_specialize_on_alignment=["limits_ptr", "shares_ptr"])
def _top_k_top_p_kernel(
    logits_ptr,  # [num_rows, vocab_size] float32
    weights_ptr,  # [num_rows, vocab_size] int64; 0 where a token is dropped
    limits_ptr,  # [num_rows] int64
    shares_ptr,  # [num_rows] float64
    vocab_size,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * vocab_size
    weights_ptr += row * vocab_size
    limit = tl.load(limits_ptr + row)
    share = tl.load(shares_ptr + row)
    cut = tl.full([], _BELOW_ALL, dtype=tl.int32)
    last = vocab_size * 1  # an id that no token has

    if limit < vocab_size:
        low = tl.full([], _BELOW_ALL + 1, dtype=tl.int64)
        high = tl.full([], _ABOVE_ALL, dtype=tl.int64)
        key, above = _find_cut(logits_ptr, weights_ptr, vocab_size, low, high, limit, cut, last, False, CHUNK)
        key = key.to(tl.int32)
        last = _find_last(logits_ptr, weights_ptr, vocab_size, key, limit - above, cut, last, False, CHUNK)
        cut = key

    if share < 1:
        sums = tl.zeros([CHUNK], dtype=tl.int64)
        lowest = tl.full([CHUNK], _ABOVE_ALL, dtype=tl.int32)
        highest = tl.full([CHUNK], _BELOW_ALL, dtype=tl.int32)
        for start in range(0, vocab_size, CHUNK):
            token, keys = _load_keys(logits_ptr, start, vocab_size, CHUNK)
            amounts = _load_amounts(weights_ptr, token, _is_kept(token, keys, cut, last) & (token < vocab_size), True)
            sums += amounts
            lowest = tl.minimum(lowest, tl.where(amounts > 0, keys, _ABOVE_ALL))
            highest = tl.maximum(highest, keys)
        wanted = tl.maximum(tl.ceil(share * tl.sum(sums).to(tl.float64)).to(tl.int64), 1)
        low = tl.min(lowest).to(tl.int64)
        high = tl.max(highest).to(tl.int64) + 1
        key, above = _find_cut(logits_ptr, weights_ptr, vocab_size, low, high, wanted, cut, last, True, CHUNK)
        key = key.to(tl.int32)
        last = _find_last(logits_ptr, weights_ptr, vocab_size, key, wanted - above, cut, last, True, CHUNK)
        cut = key

    for start in range(0, vocab_size, CHUNK):
        token, keys = _load_keys(logits_ptr, start, vocab_size, CHUNK)
        is_dropped = (token < vocab_size) & ~_is_kept(token, keys, cut, last)
        tl.store(weights_ptr + token, tl.zeros([CHUNK], dtype=tl.int64), mask=is_dropped)


def keep_best(logits: torch.Tensor, weights: torch.Tensor, limits: torch.Tensor, shares: torch.Tensor) -> None:
    """Sets `weights` to 0 outside each row's limit (top-k) and share (top-p), in place.

    A row with NaN among its logits or weights ends as some row; which is for the caller to notice.

    Args:
        logits: [num_rows, vocab_size] float32, contiguous.
        weights: [num_rows, vocab_size] int64, contiguous; not negative, not ascending where logits descend.
        limits: [num_rows] int64, at least 1; the vocabulary's size or more keeps all.
        shares: [num_rows] float64; 1 or more keeps all.

    Raises:
        ValueError: the rows of logits or weights do not lie one behind the other.
    """
    num_rows, vocab_size = logits.shape
    for name, table in (("logits", logits), ("weights", weights)):
        if not table.is_contiguous():
            raise ValueError(f"{name} of {list(table.shape)} have strides {table.stride()}; they have to be contiguous")
    if num_rows == 0:
        return
    launch = launch_for("top_k_top_p", card_of(logits.device).arch)
    _top_k_top_p_kernel[(num_rows,)](
        logits,
        weights,
        limits,
        shares,
        vocab_size,
        CHUNK=launch.tiles["chunk"],
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )


def variants(arch: int) -> list[Variant]:
    launch = launch_for("top_k_top_p", arch)
    pointers = {"logits_ptr": "*fp32", "weights_ptr": "*i64", "limits_ptr": "*i64", "shares_ptr": "*fp64"}
    return [
        Variant(
            name="top_k_top_p",
            kernel=_top_k_top_p_kernel,
            signature={**pointers, "vocab_size": "i32"},
            constants={"CHUNK": launch.tiles["chunk"]},
            aligned=frozenset({"logits_ptr", "weights_ptr", "vocab_size"}),
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
            must_fit=True,
        )
    ]
