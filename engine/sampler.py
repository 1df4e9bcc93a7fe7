"""From logits to one token for each row, by each row's own parameters. Vectorised over the batch.

Owns what `SamplingParams` mean. Knows nothing of the schedule or of the model. Randomness is in `random_stream.py`,
steps 2 to 4 in `logit_changes.py`. Nothing here waits for the device: parameters go there by `staging.py`, and nothing
comes back but what is drawn.

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

from pagedd.engine.draw import Draw, DrawnLogprobs, PendingTokens
from pagedd.engine.logit_changes import LogitChanges
from pagedd.engine.random_stream import uniforms
from pagedd.engine.sampling_params import SamplingParams
from pagedd.engine.sequence import Sequence
from pagedd.engine.staging import to_device
from pagedd.engine.step import Sampled
from pagedd.kernels.ranking import best_tokens
from pagedd.kernels.token_draw import ONE, Choices, draw_tokens, rank_tokens

# The most that `Sampler.draw` holds beside the logits it is given, where every row has penalties, top_p and
# log-probabilities. With a `keep_best` that sorts 72, measured on a CPU; without 26, counted, when the best few are
# ranked for log-probabilities, and 4 for the rows of forks, which `runner.py` copies.
_BYTES_PER_LOGIT_SORTED = 80
_BYTES_PER_LOGIT = 32

MAX_VOCAB_SIZE = (1 << 23) - 1  # so that the sum of a row's weights stays below 2⁶³


def working_bytes_per_logit(*, sorts_logits: bool) -> int:
    """Upper bound on what drawing holds beside its logits; `sorts_logits` is the backend's (`kernels/ops.py`)."""
    return _BYTES_PER_LOGIT_SORTED if sorts_logits else _BYTES_PER_LOGIT


class Sampler:
    """Stateless but for the token counts of live sequences with penalties."""

    def __init__(self) -> None:
        self._changes = LogitChanges()

    def sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[Sampled]:
        """What `draw` draws, waited for."""
        return self.draw(logits, sequences).read() if sequences else []

    def draw(
        self,
        logits: torch.Tensor,
        sequences: list[Sequence],
        num_ahead: list[int] | None = None,
        pending: PendingTokens | None = None,
    ) -> Draw:
        """One token, or a fault, for each row. Row i of `logits`, [num_rows, vocab_size] float32, is `sequences[i]`'s.

        `logits` is left as it is. Sequences, at least one, are read, never changed. `num_ahead[i]` guessed tokens lie
        between the sequence's own and the row's draw; only sequences without penalties have any. `pending` has the
        tokens of those that end with a `PENDING` one.
        """
        ahead = num_ahead or [0] * len(sequences)
        adjusted = self._changes.apply(logits, sequences, ahead, pending)
        # A broken row goes through what follows as garbage and is replaced at the end: no waiting for the device here.
        best = best_tokens(adjusted)
        is_sound = adjusted.gather(1, best[:, None]).isfinite().flatten()
        tokens = _choose(adjusted, best, sequences, ahead)
        return Draw(tokens, is_sound, _logprobs(logits, tokens, sequences))


def _choose(logits: torch.Tensor, best: torch.Tensor, sequences: list[Sequence], ahead: list[int]) -> torch.Tensor:
    """Steps 5 to 10 for every row: token ids, [num_rows] int64. Rows that need the same work are done together.

    `best` has each row's best token, [num_rows] int64.
    """
    vocab_size = logits.shape[1]
    rows_by_kind: dict[str, list[int]] = {}
    for row, sequence in enumerate(sequences):
        rows_by_kind.setdefault(_kind(sequence.request.params, vocab_size), []).append(row)
    if len(rows_by_kind) == 1:
        return _choose_alike(next(iter(rows_by_kind)), logits, best, sequences, ahead)
    tokens = torch.empty(len(sequences), dtype=torch.int64, device=logits.device)
    kinds = rows_by_kind.items()
    places = to_device([np.array(rows, dtype=np.int64) for _, rows in kinds], logits.device)
    for (kind, rows), place in zip(kinds, places, strict=True):
        alike = [sequences[i] for i in rows]
        tokens[place] = _choose_alike(kind, logits[place], best[place], alike, [ahead[i] for i in rows])
    return tokens


def _kind(params: SamplingParams, vocab_size: int) -> str:
    if params.temperature == 0:
        return "greedy"
    return "filtered" if 0 < params.top_k < vocab_size or params.top_p < 1 else "drawn"


def _choose_alike(
    kind: str, logits: torch.Tensor, best: torch.Tensor, sequences: list[Sequence], ahead: list[int]
) -> torch.Tensor:
    """Steps 5 to 10 for rows of one kind."""
    if kind == "greedy":
        return best
    params = [sequence.request.params for sequence in sequences]
    vocab_size = logits.shape[1]
    draws = uniforms(
        [p.seed for p in params],
        [sequence.choice_index for sequence in sequences],
        [sequence.num_tokens + guessed for sequence, guessed in zip(sequences, ahead, strict=True)],
    )
    temperatures, limits, shares, floors, draws_there = to_device(
        [
            np.array([p.temperature for p in params], dtype=np.float32),
            np.array([min(p.top_k, vocab_size) or vocab_size for p in params], dtype=np.int64),
            np.array([p.top_p for p in params], dtype=np.float64),
            np.array([int(p.min_p * ONE) for p in params], dtype=np.int64),
            draws,
        ],
        logits.device,
    )
    choices = Choices(
        temperatures=temperatures,
        limits=limits,
        shares=shares,
        floors=floors,
        draws=draws_there,
        is_limited=kind == "filtered",
        has_floors=any(p.min_p > 0 for p in params),
    )
    return draw_tokens(logits, choices)


def _logprobs(logits: torch.Tensor, tokens: torch.Tensor, sequences: list[Sequence]) -> DrawnLogprobs | None:
    """For the rows that want them. `logits` are the model's, `tokens` the chosen ids."""
    wanted = {row: s.request.params.num_logprobs for row, s in enumerate(sequences)}
    widths = {row: width for row, width in wanted.items() if width is not None}
    if not widths:
        return None
    rows = list(widths)
    (place,) = to_device([np.array(rows, dtype=np.int64)], logits.device)
    logits = logits[place]
    best_ids, normalizer = rank_tokens(logits, min(max(widths.values()), logits.shape[1]))
    ids = torch.cat([tokens[place, None], best_ids], dim=1)
    return DrawnLogprobs(rows, list(widths.values()), ids, logits.gather(1, ids) - normalizer)
