"""From logits to one token for each row, by each row's own parameters. Vectorised over the batch.

Owns what `SamplingParams` mean. Knows nothing of the schedule or of the model. Randomness is in `random_stream.py`, the
counts that penalties need in `token_counts.py`.

For each row, in this order:

1.  A NaN or +inf anywhere, or no finite logit at all: the row fails with `nan_logits`; its neighbours do not notice.
2.  Repetition penalty r, once for each distinct token of prompt and output: a positive logit is divided by r, any other
    multiplied by it. Then presence and frequency penalty over the output: logit − presence − frequency × count for
    tokens that occur. r is clamped to [1e-30, 1e30], so that no logit overflows.
3.  `logit_bias` is added, clamped to ±1e30.
4.  While fewer than `min_tokens` are out, stop ids are −inf. Last, so that no bias brings one back. A row left without
    any token fails like those of 1.
5.  Temperature 0: the highest logit wins, the lowest id among equals. Done.
6.  Temperature: weight = exp((logit − highest logit) / temperature) in fixed point, an integer, 2⁴⁰ for the best token.
    Tokens less likely than 2⁻⁴⁰ of the best have weight 0 and are never drawn.
7.  `top_k`: exactly the k tokens with the highest logits, lower ids first among equals. 0 or k >= vocabulary keeps all.
8.  `top_p`: of what is left, best first, the fewest tokens that hold at least that share of its weight; always one.
9.  `min_p`: of what is left, tokens with at least that fraction of the best one's weight. 1.0 keeps ties with the best.
10. The draw: the first token, by id, at which the cumulative weight exceeds u × total. u belongs to (seed, choice
    index, index of the token in the sequence).

Weights are integers so that their sums are exact: the draw can depend neither on the order in which a device adds nor
on the rest of the batch.

Log-probabilities are those of the logits as they came in, before step 2, by descending logit and then ascending id.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from pagedd.engine.draw import Draw, DrawnLogprobs
from pagedd.engine.random_stream import uniforms
from pagedd.engine.sampling_params import SamplingParams
from pagedd.engine.sequence import Sequence
from pagedd.engine.step import Sampled
from pagedd.engine.token_counts import TokenCounts
from pagedd.kernels import ops
from pagedd.kernels.ranking import best_first, rank_keys, token_ids

# The most that `Sampler.sample` holds beside the logits it is given: 72 where every row has penalties, top_p and
# log-probabilities, measured on a CPU.
WORKING_BYTES_PER_LOGIT = 80

_ONE = 1 << 40  # weight of the most likely token; a row's sum stays below 2⁶³ up to 2²³ tokens
_LIMIT = 1e30  # of bias and repetition penalty: far above any logit, far below float32's largest number


class Sampler:
    """Stateless but for the token counts of live sequences with penalties."""

    def __init__(self) -> None:
        self._counts = TokenCounts()

    def sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[Sampled]:
        """What `draw` draws, waited for."""
        return self.draw(logits, sequences).read() if sequences else []

    def draw(self, logits: torch.Tensor, sequences: list[Sequence], num_ahead: list[int] | None = None) -> Draw:
        """One token, or a fault, for each row. Row i of `logits`, [num_rows, vocab_size] float32, is `sequences[i]`'s.

        `logits` is left as it is. Sequences, at least one, are read, never changed. `num_ahead[i]` guessed tokens lie
        between the sequence's own and the row's draw; only sequences without penalties have any.
        """
        ahead = num_ahead or [0] * len(sequences)
        adjusted = self._adjust(logits, sequences, ahead)
        # A broken row goes through what follows as garbage and is replaced at the end: no waiting for the device here.
        is_sound = torch.isfinite(adjusted.amax(dim=1))
        tokens = _choose(adjusted, sequences, ahead)
        return Draw(tokens, is_sound, _logprobs(logits, tokens, sequences))

    def _adjust(self, logits: torch.Tensor, sequences: list[Sequence], ahead: list[int]) -> torch.Tensor:
        """Steps 2 to 4. Returns `logits` itself when no row asks for any of them, else a changed copy."""
        penalties, biases, bans = _Entries(), _Entries(), _Entries()
        for row, sequence in enumerate(sequences):
            params = sequence.request.params
            if params.needs_token_counts:
                distinct, output_counts = self._counts.of(sequence)
                penalties.add(row, distinct, *_penalty_terms(params, output_counts))
            if params.logit_bias:
                biased = np.fromiter(params.logit_bias.keys(), dtype=np.int64)
                amounts = np.fromiter(params.logit_bias.values(), dtype=np.float64)
                biases.add(row, biased, amounts.clip(-_LIMIT, _LIMIT))
            if params.stop_token_ids and sequence.num_output_tokens + ahead[row] < params.min_tokens:
                bans.add(row, np.array(params.stop_token_ids, dtype=np.int64))
        if not (penalties or biases or bans):
            return logits

        logits = logits.clone()
        if penalties:
            rows, token_ids, repetition, subtrahend = penalties.tensors(logits)
            values = logits[rows, token_ids]
            values = torch.where(values > 0, values / repetition, values * repetition)
            logits[rows, token_ids] = values - subtrahend
        if biases:
            rows, token_ids, amount = biases.tensors(logits)
            logits[rows, token_ids] += amount
        if bans:
            rows, token_ids = bans.tensors(logits)
            # Subtracted rather than assigned, so that a NaN or +inf still shows.
            logits[rows, token_ids] -= torch.inf
        return logits


class _Entries:
    """(row, token id, numbers) collected from many sequences for one batched gather and scatter."""

    def __init__(self) -> None:
        self._rows: list[NDArray[np.int64]] = []
        self._token_ids: list[NDArray[np.int64]] = []
        self._columns: list[tuple[NDArray[np.float64], ...]] = []

    def __bool__(self) -> bool:
        return bool(self._rows)

    def add(self, row: int, token_ids: NDArray[np.int64], *columns: NDArray[np.float64]) -> None:
        """Distinct `token_ids` of one row and, for each column, one number an id."""
        self._rows.append(np.full_like(token_ids, row))
        self._token_ids.append(token_ids)
        self._columns.append(columns)

    def tensors(self, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Rows and token ids (int64), then the columns (float32), on `logits`' device. Ids it lacks are dropped."""
        token_ids = np.concatenate(self._token_ids)
        is_inside = (token_ids >= 0) & (token_ids < logits.shape[1])
        columns = [np.concatenate(parts).astype(np.float32) for parts in zip(*self._columns, strict=True)]
        arrays: list[NDArray[np.int64] | NDArray[np.float32]] = [np.concatenate(self._rows), token_ids, *columns]
        return tuple(torch.from_numpy(array[is_inside]).to(logits.device) for array in arrays)


def _penalty_terms(
    params: SamplingParams, output_counts: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """For each token, what its logit is divided or multiplied by, and what is subtracted after that."""
    repetition = min(max(params.repetition_penalty, 1 / _LIMIT), _LIMIT)
    subtrahend = params.presence_penalty * (output_counts > 0) + params.frequency_penalty * output_counts
    return np.full(len(output_counts), repetition), subtrahend


def _choose(logits: torch.Tensor, sequences: list[Sequence], ahead: list[int]) -> torch.Tensor:
    """Steps 5 to 10 for every row: token ids, [num_rows] int64. Rows that need the same work are done together."""
    vocab_size = logits.shape[1]
    rows_by_kind: dict[str, list[int]] = {}
    for row, sequence in enumerate(sequences):
        rows_by_kind.setdefault(_kind(sequence.request.params, vocab_size), []).append(row)
    if len(rows_by_kind) == 1:
        return _choose_alike(next(iter(rows_by_kind)), logits, sequences, ahead)
    tokens = torch.empty(len(sequences), dtype=torch.int64, device=logits.device)
    for kind, rows in rows_by_kind.items():
        tokens[rows] = _choose_alike(kind, logits[rows], [sequences[i] for i in rows], [ahead[i] for i in rows])
    return tokens


def _kind(params: SamplingParams, vocab_size: int) -> str:
    if params.temperature == 0:
        return "greedy"
    return "filtered" if 0 < params.top_k < vocab_size or params.top_p < 1 else "drawn"


def _choose_alike(kind: str, logits: torch.Tensor, sequences: list[Sequence], ahead: list[int]) -> torch.Tensor:
    """Steps 5 to 10 for rows of one kind."""
    if kind == "greedy":
        return logits.argmax(dim=1)  # torch promises the first of equal maxima
    params = [sequence.request.params for sequence in sequences]
    weights = _weights(logits, [p.temperature for p in params])
    if kind == "filtered":
        vocab_size = logits.shape[1]
        limits = torch.tensor([min(p.top_k, vocab_size) or vocab_size for p in params], device=logits.device)
        shares = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=logits.device)
        ops.keep_best(logits, weights, limits, shares)
    if any(p.min_p > 0 for p in params):
        floors = torch.tensor([[int(p.min_p * _ONE)] for p in params], device=logits.device)
        weights.masked_fill_(weights < floors, 0)
    draws = uniforms(
        [p.seed for p in params],
        [sequence.choice_index for sequence in sequences],
        [sequence.num_tokens + guessed for sequence, guessed in zip(sequences, ahead, strict=True)],
    )
    return _invert_cdf(weights, torch.from_numpy(draws).to(logits.device))


def _weights(logits: torch.Tensor, temperatures: list[float]) -> torch.Tensor:
    """exp((logit − highest) / temperature) × 2⁴⁰, truncated, [num_rows, vocab_size] int64."""
    # The highest is subtracted before dividing, so a tiny temperature gives 0 and −inf, never +inf or NaN.
    tiny = torch.finfo(torch.float32).tiny
    temperature = torch.tensor([[max(t, tiny)] for t in temperatures], dtype=torch.float32, device=logits.device)
    relative = (logits - logits.amax(dim=1, keepdim=True)).div_(temperature)
    return relative.exp_().mul_(_ONE).long()


def _invert_cdf(weights: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Each row's first token whose cumulative weight exceeds draw × total. `draws` is [num_rows] float64 in [0, 1)."""
    cumulative = weights.cumsum(dim=1)
    total = cumulative[:, -1]
    target = torch.minimum((draws * total).long(), total - 1)
    return torch.searchsorted(cumulative, target[:, None], right=True).flatten().clamp_max(weights.shape[1] - 1)


def _logprobs(logits: torch.Tensor, tokens: torch.Tensor, sequences: list[Sequence]) -> DrawnLogprobs | None:
    """For the rows that want them. `logits` are the model's, `tokens` the chosen ids."""
    wanted = {row: s.request.params.num_logprobs for row, s in enumerate(sequences)}
    widths = {row: width for row, width in wanted.items() if width is not None}
    if not widths:
        return None
    vocab_size, rows = logits.shape[1], list(widths)
    logits = logits[rows]
    normalizer = logits.logsumexp(dim=1, keepdim=True)
    width = min(max(widths.values()), vocab_size)
    ids = tokens[rows, None]
    if width:
        best_ids = token_ids(best_first(rank_keys(logits), width), vocab_size)
        ids = torch.cat([ids, best_ids], dim=1)
    return DrawnLogprobs(rows, list(widths.values()), ids, logits.gather(1, ids) - normalizer)
