"""What a request does to its logits before a token is chosen: penalties, biases, stop ids that are not allowed yet.

Owns steps 2 to 4 of `sampler.py`, where their meaning is said. The counts that penalties need are in `token_counts.py`;
a token that only the device knows is counted there. Nothing here waits for it.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from pagedd.engine.draw import PendingTokens
from pagedd.engine.sampling_params import SamplingParams
from pagedd.engine.sequence import PENDING, Sequence
from pagedd.engine.staging import to_device
from pagedd.engine.token_counts import TokenCounts

_LIMIT = 1e30  # of bias and repetition penalty: far above any logit, far below float32's largest number


class LogitChanges:
    """Stateless but for the token counts of live sequences with penalties."""

    def __init__(self) -> None:
        self._counts = TokenCounts()

    def apply(
        self, logits: torch.Tensor, sequences: list[Sequence], ahead: list[int], pending: PendingTokens | None
    ) -> torch.Tensor:
        """Returns `logits` itself when no row asks for any change, else a changed copy. Arguments as in `Sampler`."""
        penalties, biases, bans = _Penalties(), _Entries(), _Entries()
        for row, sequence in enumerate(sequences):
            params = sequence.request.params
            if params.needs_token_counts:
                penalties.add(row, sequence, *self._counts.of(sequence))
            if params.logit_bias:
                biased = np.fromiter(params.logit_bias.keys(), dtype=np.int64)
                amounts = np.fromiter(params.logit_bias.values(), dtype=np.float64)
                biases.add(row, biased, amounts.clip(-_LIMIT, _LIMIT).astype(np.float32))
            if params.stop_token_ids and sequence.num_output_tokens + ahead[row] < params.min_tokens:
                bans.add(row, np.array(params.stop_token_ids, dtype=np.int64))
        if not (penalties or biases or bans):
            return logits

        logits = logits.clone()
        if penalties:
            penalties.apply(logits, pending)
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
        self._columns: list[tuple[NDArray[np.float32] | NDArray[np.int64], ...]] = []

    def __bool__(self) -> bool:
        return bool(self._rows)

    def add(self, row: int, token_ids: NDArray[np.int64], *columns: NDArray[np.float32] | NDArray[np.int64]) -> None:
        """Distinct `token_ids` of one row and, for each column, one number an id."""
        self._rows.append(np.full_like(token_ids, row))
        self._token_ids.append(token_ids)
        self._columns.append(columns)

    def tensors(self, logits: torch.Tensor) -> list[torch.Tensor]:
        """Rows and token ids (int64), then the columns, on `logits`' device. Ids it lacks are dropped."""
        token_ids = np.concatenate(self._token_ids)
        is_inside = (token_ids >= 0) & (token_ids < logits.shape[1])
        columns = [np.concatenate(parts) for parts in zip(*self._columns, strict=True)]
        arrays = [np.concatenate(self._rows), token_ids, *columns]
        return to_device([array[is_inside] for array in arrays], logits.device)


class _Penalties:
    """Rows with penalties, and the tokens that each of them holds."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._sequences: list[Sequence] = []
        self._entries = _Entries()  # by index into the two above

    def __bool__(self) -> bool:
        return bool(self._rows)

    def add(self, row: int, sequence: Sequence, token_ids: NDArray[np.int64], output_counts: NDArray[np.int64]) -> None:
        self._entries.add(len(self._rows), token_ids, output_counts)
        self._rows.append(row)
        self._sequences.append(sequence)

    def apply(self, logits: torch.Tensor, pending: PendingTokens | None) -> None:
        """Changes `logits` in place."""
        params = [sequence.request.params for sequence in self._sequences]
        waits = [sequence.token_ids[-1] == PENDING for sequence in self._sequences]
        owners = pending.rows if pending is not None else {}
        owned = [owners[sequence] if waiting else 0 for sequence, waiting in zip(self._sequences, waits, strict=True)]
        rows, pending_rows, terms, is_waiting = to_device(
            [np.array(self._rows), np.array(owned), np.array([_terms(p) for p in params]), np.array(waits)],
            logits.device,
        )
        entry, token_ids, counts = self._entries.tensors(logits)
        if pending is None or not any(waits):
            _penalise(logits, rows[entry], token_ids, counts, terms[entry])
            return
        newest = pending.tokens[pending_rows]
        # The token that only the device knows is either one of those that are known, once more, or a new one.
        is_newest = (token_ids == newest[entry]) & is_waiting[entry]
        _penalise(logits, rows[entry], token_ids, counts + is_newest, terms[entry])
        is_known = torch.zeros_like(newest).index_add_(0, entry, is_newest.long()) > 0
        before = logits[rows, newest]
        _penalise(logits, rows, newest, torch.ones_like(newest), terms)
        logits[rows, newest] = torch.where(is_known | ~is_waiting, before, logits[rows, newest])


def _terms(params: SamplingParams) -> tuple[float, float, float]:
    repetition = min(max(params.repetition_penalty, 1 / _LIMIT), _LIMIT)
    return repetition, params.presence_penalty, params.frequency_penalty


def _penalise(
    logits: torch.Tensor,  # [num_rows, vocab_size], changed in place
    rows: torch.Tensor,  # [n] int64; no (row, id) twice
    token_ids: torch.Tensor,  # [n] int64
    counts: torch.Tensor,  # [n] int64, of each token in the output
    terms: torch.Tensor,  # [n, 3] float64: repetition, presence, frequency
) -> None:
    repetition, presence, frequency = terms.unbind(1)
    values = logits[rows, token_ids]
    values = torch.where(values > 0, values / repetition.float(), values * repetition.float())
    logits[rows, token_ids] = values - (presence * (counts > 0) + frequency * counts).float()
