"""From logits to tokens: what temperature, top-k, top-p, min-p and a random number make of each row; its best tokens.

`engine/sampler.py` says what the steps mean. On a CPU they are the C++ extension's, where it is loaded; elsewhere torch
operations, which never wait for the device. Both weigh tokens in integers, so a row does not depend on the others.
"""

from dataclasses import dataclass

import torch

from pagedd.kernels import cpu, ops
from pagedd.kernels.ranking import best_first, rank_keys, token_ids

ONE = 1 << 40  # weight of the most likely token


@dataclass(frozen=True, slots=True)
class Choices:
    """How each row is drawn; all on the logits' device.

    Attributes:
        temperatures: [num_rows] float32, above 0.
        limits: [num_rows] int64, top_k, at least 1; the vocabulary's size or more keeps all.
        shares: [num_rows] float64, top_p.
        floors: [num_rows] int64, min_p as a share of `ONE`.
        draws: [num_rows] float64 in [0, 1).
        is_limited: whether any limit or share leaves tokens out; known without asking the device.
        has_floors: whether any floor does.
    """

    temperatures: torch.Tensor
    limits: torch.Tensor
    shares: torch.Tensor
    floors: torch.Tensor
    draws: torch.Tensor
    is_limited: bool
    has_floors: bool


def draw_tokens(logits: torch.Tensor, choices: Choices) -> torch.Tensor:
    """A token of each row, [num_rows] int64. `logits` is [num_rows, vocab_size] float32; a row with a NaN gives any."""
    if logits.device.type == "cpu" and (extension := cpu.loaded()) is not None:
        tokens: torch.Tensor = extension.draw_tokens(
            logits, choices.temperatures, choices.limits, choices.shares, choices.floors, choices.draws
        )
        return tokens
    weights = _weights(logits, choices.temperatures)
    if choices.is_limited:
        ops.keep_best(logits, weights, choices.limits, choices.shares)
    if choices.has_floors:
        weights.masked_fill_(weights < choices.floors[:, None], 0)
    return _invert_cdf(weights, choices.draws)


def rank_tokens(logits: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `width` best of each row, by descending logit and then ascending id, and log Σ exp of its logits.

    Returns:
        [num_rows, width] int64 ids and [num_rows, 1] float32.
    """
    if logits.device.type == "cpu" and (extension := cpu.loaded()) is not None:
        ids, normalizers = extension.rank_tokens(logits, width)
        return ids, normalizers
    vocab_size = logits.shape[1]
    ids = token_ids(best_first(rank_keys(logits), max(width, 1)), vocab_size)[:, :width]
    return ids, logits.logsumexp(dim=1, keepdim=True)


def _weights(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """exp((logit − highest) / temperature) × 2⁴⁰, truncated, [num_rows, vocab_size] int64."""
    # The highest is subtracted before dividing, so a tiny temperature gives 0 and −inf, never +inf or NaN.
    temperature = temperatures[:, None].clamp_min(torch.finfo(torch.float32).tiny)
    relative = (logits - logits.amax(dim=1, keepdim=True)).div_(temperature)
    return relative.exp_().mul_(ONE).long()


def _invert_cdf(weights: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Each row's first token whose cumulative weight exceeds draw × total. `draws` is [num_rows] float64 in [0, 1)."""
    cumulative = weights.cumsum(dim=1)
    total = cumulative[:, -1]
    target = torch.minimum((draws * total).long(), total - 1)
    return torch.searchsorted(cumulative, target[:, None], right=True).flatten().clamp_max(weights.shape[1] - 1)
