"""What the whole model's figures are held against."""

from types import SimpleNamespace

import pytest
import torch

from pagedd.bench import gpu_model
from pagedd.bench.gpu_check import TINY
from pagedd.bench.gpu_model import bytes_of_a_step
from pagedd.engine.request import SequenceOutput


def test_a_decode_step_reads_every_weight_but_the_embedding() -> None:
    assert bytes_of_a_step(1000, SimpleNamespace(vocab=10, hidden=8), torch.bfloat16) == 1000 - 10 * 8 * 2


class Failing:
    """An engine whose only sequence ends with an error, or is not there."""

    def __init__(self, outputs: list[SequenceOutput]) -> None:
        self._outputs = outputs

    @property
    def has_work(self) -> bool:
        return bool(self._outputs)

    def add(self, request: object) -> None: ...

    def step(self) -> list[SequenceOutput]:
        return [self._outputs.pop()]


@pytest.mark.parametrize(
    ("outputs", "said"),
    [
        ([SequenceOutput(request_id="0", choice_index=0, token_ids=[], error_code="nan_logits")], "nan_logits"),
        ([], "nothing to do"),
    ],
)
def test_an_engine_that_fails_is_not_waited_for(outputs: list[SequenceOutput], said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        gpu_model._decode(Failing(outputs), 1, TINY)  # type: ignore[arg-type]
