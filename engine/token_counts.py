"""Which tokens a sequence holds, and how often each is in its output: what the penalties of `sampler.py` need.

Counts are kept for each live sequence and brought up to date by its new tokens alone. They are derived from
`Sequence.token_ids`, which a preemption keeps and a fork copies, so both need nothing here; they go when the sequence
object goes.
"""

from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from pagedd.engine.sequence import PENDING, Sequence


class TokenCounts:
    """Counts for every sequence asked about and still alive."""

    def __init__(self) -> None:
        self._by_sequence: WeakKeyDictionary[Sequence, _SequenceCounts] = WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._by_sequence)

    def of(self, sequence: Sequence) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Distinct ids of prompt and output, and how often each occurs in the output (0: in the prompt alone).

        A `PENDING` token is left out, and counted once it is known.

        Both are views, [num_distinct] int64, true until the next call for the same sequence.
        """
        counts = self._by_sequence.get(sequence)
        if counts is None:
            counts = self._by_sequence[sequence] = _SequenceCounts(sequence.token_ids[: sequence.num_prompt_tokens])
        new_token_ids = sequence.token_ids[counts.num_counted :]
        if new_token_ids and new_token_ids[-1] == PENDING:
            new_token_ids.pop()
        counts.extend(new_token_ids)
        return counts.token_ids, counts.output_counts


class _SequenceCounts:
    """Distinct ids in parallel arrays that double when full; `_row_of` finds an id's row."""

    def __init__(self, prompt_token_ids: list[int]) -> None:
        distinct = np.unique(np.array(prompt_token_ids, dtype=np.int64))
        self.num_counted = len(prompt_token_ids)
        self._token_ids = distinct
        self._output_counts = np.zeros_like(distinct)
        self._row_of = {token_id: row for row, token_id in enumerate(distinct.tolist())}

    @property
    def token_ids(self) -> NDArray[np.int64]:
        return self._token_ids[: len(self._row_of)]

    @property
    def output_counts(self) -> NDArray[np.int64]:
        return self._output_counts[: len(self._row_of)]

    def extend(self, output_token_ids: list[int]) -> None:
        for token_id in output_token_ids:
            row = self._row_of.setdefault(token_id, len(self._row_of))
            if row == len(self._token_ids):
                self._token_ids = np.concatenate([self._token_ids, np.zeros(max(16, row), dtype=np.int64)])
                self._output_counts = np.concatenate([self._output_counts, np.zeros(max(16, row), dtype=np.int64)])
            self._token_ids[row] = token_id
            self._output_counts[row] += 1
        self.num_counted += len(output_token_ids)
