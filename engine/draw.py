"""What a sampler drew: tensors on the device, and their way to the host while the device goes on.

Owns that copy. What is drawn is `sampler.py`'s; who waits for it, `runner.py`'s.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pagedd.engine.request import TokenLogprobs
from pagedd.engine.sequence import Sequence
from pagedd.engine.step import Sampled


@dataclass(frozen=True, slots=True, eq=False)
class PendingTokens:
    """What a launched step draws: only the device knows it, and the next step is launched on top of it.

    Attributes:
        rows: whose token is where.
        tokens: [num_rows] int64.
    """

    rows: Mapping[Sequence, int]
    tokens: torch.Tensor


@dataclass(slots=True)
class DrawnLogprobs:
    """Log-probabilities of the rows that want them.

    Attributes:
        rows: of the draw.
        widths: how many of the best tokens each of them wants.
        ids: [len(rows), 1 + widest] int64, the drawn token and then the best, best first.
        values: the same shape, float32, natural logarithms.
    """

    rows: list[int]
    widths: list[int]
    ids: torch.Tensor
    values: torch.Tensor


@dataclass(slots=True)
class Draw:
    """One token for each row.

    Attributes:
        tokens: [num_rows] int64.
        is_sound: [num_rows] bool; a row that is not has failed with `nan_logits`.
        logprobs: of the rows that want them; None when none does.
    """

    tokens: torch.Tensor
    is_sound: torch.Tensor
    logprobs: DrawnLogprobs | None = None

    def start_copy(self) -> "Draw":
        """The same on the host, once the device has come as far as this; nothing at all where it is the host."""
        logprobs = self.logprobs
        if logprobs is not None:
            logprobs = DrawnLogprobs(
                logprobs.rows, logprobs.widths, _copy_to_host(logprobs.ids), _copy_to_host(logprobs.values)
            )
        return Draw(_copy_to_host(self.tokens), _copy_to_host(self.is_sound), logprobs)

    def read(self) -> list[Sampled]:
        """As values; of tensors on a device, this waits for it."""
        logprobs = self._read_logprobs()
        return [
            Sampled(token_id=token_id, logprobs=logprobs.get(row))
            if sound
            else Sampled(token_id=0, error_code="nan_logits")
            for row, (token_id, sound) in enumerate(zip(self.tokens.tolist(), self.is_sound.tolist(), strict=True))
        ]

    def _read_logprobs(self) -> dict[int, TokenLogprobs]:
        if self.logprobs is None:
            return {}
        drawn = self.logprobs
        return {
            row: TokenLogprobs(logprob=values[0], top=list(zip(ids[1:], values[1:], strict=True))[:width])
            for row, width, ids, values in zip(
                drawn.rows, drawn.widths, drawn.ids.tolist(), drawn.values.tolist(), strict=True
            )
        }


def _copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type == "cpu":
        return tensor
    # Only into pinned memory does a copy run beside what the host does next.
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
