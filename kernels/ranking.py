"""Tokens in the order of their logits, over torch operations: the best few, and what top-k and top-p leave over.

Most rows need few of the best, and ranking few is much cheaper than sorting a vocabulary.
"""

import numpy as np
import torch

_NARROW = 1024  # best tokens ranked at first


def keep_best(logits: torch.Tensor, weights: torch.Tensor, limits: torch.Tensor, shares: torch.Tensor) -> None:
    keys = rank_keys(logits)
    limit, share = limits[:, None], shares[:, None]
    cutoff, is_settled = _cutoff(keys, weights, limit, share, min(_NARROW, logits.shape[1]))
    unsettled = (~is_settled).nonzero().flatten()
    if len(unsettled):
        cutoff[unsettled], _ = _cutoff(
            keys[unsettled], weights[unsettled], limit[unsettled], share[unsettled], logits.shape[1]
        )
    weights.masked_fill_(keys < cutoff, 0)


def _cutoff(
    keys: torch.Tensor,  # [num_rows, vocab_size] int64, see rank_keys
    weights: torch.Tensor,  # [num_rows, vocab_size] int64
    limit: torch.Tensor,  # [num_rows, 1] int64, most tokens to keep
    share: torch.Tensor,  # [num_rows, 1] float64, least share of their weight to keep
    width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The last kept token's key, [num_rows, 1], and whether the `width` best tokens suffice to know it, [num_rows]."""
    vocab_size = keys.shape[1]
    ranked = best_first(keys, width)
    rank = torch.arange(width, device=keys.device)
    ranked_weights = weights.gather(1, token_ids(ranked, vocab_size)).masked_fill_(rank >= limit, 0)
    total = torch.where(limit < vocab_size, ranked_weights.sum(dim=1, keepdim=True), weights.sum(dim=1, keepdim=True))
    # A share of 1 is the exact total: past 2⁵³ the product would be rounded.
    wanted = torch.where(share < 1, (share * total).ceil().long(), total)
    reached = ranked_weights.cumsum(dim=1)
    is_kept = (reached - ranked_weights < wanted) & (rank < limit)
    num_kept = is_kept.sum(dim=1, keepdim=True).clamp_min(1)
    is_settled = (limit <= width) | ((limit >= vocab_size) & (reached[:, -1:] >= wanted))
    return ranked.gather(1, num_kept - 1), is_settled.flatten()


def best_tokens(logits: torch.Tensor) -> torch.Tensor:
    """The id of each row's highest logit, [num_rows] int64: the lowest among equals, or the first that is NaN."""
    if logits.device.type == "cpu":
        # On a CPU numpy's search takes a tenth of the time of torch's.
        return torch.from_numpy(logits.numpy().argmax(axis=1))
    return logits.argmax(dim=1)


def rank_keys(logits: torch.Tensor) -> torch.Tensor:
    """An int64 for each logit, sorting by logit and equals by descending id: the logit is the high half."""
    bits = (logits + 0.0).view(torch.int32)  # adding 0 turns −0.0 into 0.0, its equal
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # floats as integers of the same order
    descending_ids = torch.arange(logits.shape[1] - 1, -1, -1, device=logits.device)
    return ordered.long().mul_(1 << 32).add_(descending_ids)


def token_ids(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    return vocab_size - 1 - (keys & 0xFFFFFFFF)


def best_first(keys: torch.Tensor, width: int) -> torch.Tensor:
    """The `width` (at least 1) largest keys of each row, largest first."""
    if keys.device.type == "cpu":
        # numpy's vectorised selection and sort are many times faster than torch's on a CPU.
        first = keys.shape[1] - width
        largest = keys.numpy() if first == 0 else np.partition(keys.numpy(), first, axis=1)[:, first:]
        return torch.from_numpy(np.sort(largest, axis=1)[:, ::-1].copy())
    return keys.topk(width, dim=1).values
