"""Accuracy: scores with exact values, and logits of every position, whatever the chunk."""

import math
from types import SimpleNamespace

import pytest
import torch

from pagedd.bench import accuracy
from pagedd.bench.accuracy import (
    Case,
    WindowScore,
    chunked_logits,
    compare,
    make_cases,
    measure,
    perplexity,
    reference_text,
    score,
    spread,
    take_windows,
)
from pagedd.engine.errors import EngineError
from pagedd.engine.kv.storage import KVStorage
from pagedd.kernels.kv_form import FORMS


def test_the_text_is_long_enough_and_the_same_each_time():
    text = reference_text()
    assert len(text) > 300_000  # over 70 000 tokens
    assert text == reference_text()
    assert text.startswith('The "assert" statement')


def test_windows_reach_from_the_first_token_to_the_last_and_do_not_overlap():
    assert take_windows(range(11), 3, 3) == [[0, 1, 2], [4, 5, 6], [8, 9, 10]]
    assert take_windows(range(6), 2, 3) == [[0, 1, 2], [3, 4, 5]]
    assert take_windows(range(6), 1, 3) == [[0, 1, 2]]


def test_a_text_too_short_for_the_windows_is_refused():
    with pytest.raises(ValueError, match="3 windows of 4 tokens do not fit a text of 11"):
        take_windows(range(11), 3, 4)


def test_few_windows_come_from_all_of_the_text():
    assert spread(48, 4) == [0, 12, 24, 36]
    assert spread(3, 8) == [0, 1, 2]


def test_a_row_predicts_the_next_token_and_the_last_row_none():
    probabilities = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [1.0, 1.0, 1.0]])
    scored = score(probabilities.log(), [2, 0, 1])
    assert scored.nll.tolist() == pytest.approx([math.log(2), -math.log(0.8)])
    assert scored.top_1.tolist() == [0, 1]


def test_a_comparison_is_over_all_tokens_of_all_windows():
    reference = [
        WindowScore(torch.tensor([2.0, 2.0]), torch.tensor([5, 6])),
        WindowScore(torch.zeros(2), torch.ones(2)),
    ]
    measured = [WindowScore(torch.tensor([2.0, 3.0]), torch.tensor([5, 9])), WindowScore(torch.zeros(2), torch.ones(2))]
    result = compare(measured, reference)
    assert perplexity(reference) == pytest.approx(math.e)
    assert result.num_tokens == 4
    assert result.perplexity == pytest.approx(math.exp(1.25))
    assert result.delta == pytest.approx(math.exp(0.25) - 1)
    assert result.top_1 == 0.75


def test_weights_are_measured_with_their_own_kv_and_kv_on_the_files_own_weights():
    assert make_cases(["auto", "float32", "int8"], ["fp8"]) == [
        Case("auto", "auto"),
        Case("float32", "float32"),
        Case("int8", "bf16"),
        Case("auto", "fp8"),
    ]


class CountingModel:
    """The logits of a token are its id and its position; notes the chunks that it is given."""

    def __init__(self) -> None:
        self.chunks: list[int] = []

    def forward(self, batch, kv) -> torch.Tensor:
        assert batch.attention.slot_mapping.tolist() == batch.positions.tolist()
        self.chunks.append(len(batch.token_ids))
        return torch.stack([batch.token_ids, batch.positions], dim=1).float()[batch.logits_rows]


class CountingRunner:
    def __init__(self) -> None:
        self._model = CountingModel()
        sizes = SimpleNamespace(num_layers=1, num_kv_heads=1, head_dim=32)
        self.storage = KVStorage(sizes, 3, accuracy.BLOCK_SIZE, FORMS["bf16"], torch.device("cpu"))


@pytest.mark.parametrize(("num_rows", "chunks"), [(40, [40]), (16, [16, 16, 8]), (1, [1] * 40)])
def test_logits_of_every_position_come_in_order_from_chunks_of_any_size(num_rows: int, chunks: list[int]):
    runner = CountingRunner()
    logits = chunked_logits(runner, list(range(100, 140)), num_rows)
    assert logits[:, 0].tolist() == list(range(100, 140))
    assert logits[:, 1].tolist() == list(range(40))
    assert runner._model.chunks == chunks


def test_settings_that_the_engine_does_not_know_are_refused_by_it(model_gguf):
    with pytest.raises(EngineError, match="int3"):
        list(measure(Case("float32", "int3"), model_gguf, [[1] * 16], [], rows=[16], num_few_windows=1))


@pytest.mark.slow
def test_float32_of_the_engine_is_the_reference_at_every_row_count(model_gguf):
    windows = [list(range(100, 148)), list(range(900, 948))]
    reference = accuracy._score_all(accuracy.reference_logits(model_gguf), windows)
    results = list(
        measure(Case("float32", "auto"), model_gguf, windows, reference, rows=[48, 32, 1], num_few_windows=1)
    )
    assert [result.comparison.num_tokens for result in results] == [94, 94, 47]
    for result in results:
        assert result.comparison.delta == pytest.approx(0, abs=1e-4)
        assert result.comparison.top_1 == 1.0
