"""What the whole model's figures are held against."""

from types import SimpleNamespace

import pytest
import torch

from pagedd.bench import gpu_model
from pagedd.bench.gpu_check import FULL, TINY
from pagedd.bench.gpu_model import bytes_of_a_step, fitting
from pagedd.engine.request import SequenceOutput
from pagedd.kernels.kv_form import FORMS


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


@pytest.mark.parametrize(
    ("gib", "layers", "batches"), [(139, 32, (1, 8, 64, 256)), (24, 32, (1, 8, 64)), (8, 8, (1, 8)), (2, 1, (1,))]
)
def test_a_small_card_gets_fewer_layers_and_smaller_batches(gib: int, layers: int, batches: tuple[int, ...]) -> None:
    fits = fitting(FULL, gib << 30, torch.bfloat16)
    assert (fits.layers, fits.batches) == (layers, batches)


@pytest.mark.parametrize("form", ["bf16", "int8", "int4"])
def test_replays_equal_eager_steps_over_every_kind_of_cache(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDD_KERNELS", "triton")
    device = torch.device("cpu")
    theirs = gpu_model.random_llama(device, TINY, torch.float32, num_layers=1)
    loaded = gpu_model.load_from(theirs, device, torch.float32)
    rows = list(gpu_model.replayed_steps(loaded, FORMS[form], TINY, [5, 18]))
    assert [row["what"] for row in rows] == [
        f"difference of replayed, {form}, 2",
        f"eager, {form}, 2",
        f"replayed, {form}, 2",
    ]


def test_logits_are_held_to_those_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDD_KERNELS", "triton")
    theirs = gpu_model.random_llama(torch.device("cpu"), TINY, torch.float32, num_layers=1)
    (sequence,) = gpu_model.random_sequences([8])
    logits = gpu_model._their_logits(theirs, torch.device("cpu"), sequence.token_ids)
    loaded = gpu_model.load_from(theirs, torch.device("cpu"), torch.float32)
    assert gpu_model._difference(loaded, sequence, logits) < 1e-3
    assert gpu_model._difference(loaded, sequence, logits.flip(0)) > gpu_model.MOST_DIFFERENCE
