"""Contexts cut over several programs against the specification, and how many they are cut into."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from pagedd.kernels import reference
from pagedd.kernels.kv_form import FORMS
from pagedd.kernels.layout import QuantizedLayer
from pagedd.kernels.triton import paged_attention, split_decode
from pagedd.kernels.triton.card import Card
from pagedd.kernels.triton.paged_attention import paged_attention as attend
from pagedd.kernels.triton.split_decode import MIN_KEYS, choose_num_splits

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}

SHAPES = [(8, 64, 1), (16, 80, 3), (32, 96, 4), (16, 128, 8), (8, 256, 4)]
ALL_SHAPES = list(product((8, 16, 32), (64, 80, 96, 128, 256), (1, 3, 4, 8)))


@pytest.fixture
def make(paged: Callable[..., Any], poisoned_memory: None) -> Callable[..., Any]:
    """Batches whose unwritten slots hold NaN, while outputs and workspaces begin as NaN."""

    def make(lens: list[tuple[int, int]], shape: tuple[int, int, int] = (16, 64, 2), **options: Any) -> Any:
        block_size, head_dim, group = shape
        return paged(lens, block_size=block_size, num_heads=group, num_kv_heads=1, head_dim=head_dim, **options)

    return make


@pytest.fixture
def splits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many splits each call took."""
    taken: list[int] = []

    def attend_split(*args: Any, num_splits: int, **options: Any) -> None:
        taken.append(num_splits)
        split_decode.attend_split(*args, num_splits=num_splits, **options)

    monkeypatch.setattr(paged_attention, "attend_split", attend_split)
    return taken


def check(batch: Any, **options: Any) -> torch.Tensor:
    """Holds the kernels to the specification, and returns what they computed."""
    scale = batch.query.shape[-1] ** -0.5
    y = attend(batch.query, batch.kv_layer, batch, scale=scale, **options)
    expected = reference.paged_attention(batch.query.double(), batch.kv_layer, batch, scale=scale, **options)
    products = batch.query.dtype if isinstance(batch.kv_layer, QuantizedLayer) else batch.kv_layer.dtype
    tolerance = TOLERANCE[products]
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)
    return y


@pytest.mark.parametrize(("form", "shape"), list(zip(FORMS, [*SHAPES, *SHAPES[1:3]], strict=True)), ids=str)
def test_a_long_context_equals_the_reference(make, splits, form, shape) -> None:
    check(make([(1, 300)], shape, form=form))
    assert splits == [2]


@pytest.mark.kernels
@pytest.mark.parametrize("shape", ALL_SHAPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_every_shape_and_form_equals_the_reference(make, splits, shape, form) -> None:
    check(make([(1, 300), (1, 5), (1, 129)], shape, form=form))
    check(make([(1, 400), (1, 20)], shape, form=form), sliding_window=270, soft_cap=3.0)
    assert splits == [2, 3]


@pytest.mark.parametrize("context", [255, 256, 257, 384, 511, 513])
def test_splits_meet_wherever_the_context_ends(make, splits, context) -> None:
    check(make([(1, context), (1, 600)], (16, 64, 1)))
    assert splits == [4]


def test_a_context_too_short_for_all_splits_uses_fewer(make, splits) -> None:
    check(make([(1, 600), (1, 1), (1, 127), (1, 128), (1, 129), (1, 260)], (16, 64, 1)))
    assert splits == [4]


@pytest.mark.parametrize("window", [1, 100, 128, 129, 300])
def test_only_the_window_is_cut(make, splits, window) -> None:
    check(make([(1, 600), (1, 40)], (16, 64, 1)), sliding_window=window)
    assert splits == [4]


def test_scores_are_capped_before_they_are_merged(make, splits) -> None:
    check(make([(1, 300), (1, 200)]), soft_cap=1.5)
    assert splits == [2]


def test_a_row_may_see_nothing_of_the_last_split(make, splits) -> None:
    # Of four guesses the first is at position 255, and the last split of 128 keys begins at 256.
    check(make([(4, 259), (2, 400), (1, 7)], (16, 64, 4)))
    assert splits == [3]


def test_chunks_beside_are_written_by_their_own_launch(make, splits) -> None:
    check(make([(1, 300), (1, 40), (40, 60), (2, 9)]))
    assert splits == [2]


def test_a_padded_sequence_without_rows_or_keys_is_left_out(make, splits) -> None:
    batch = make([(1, 300), (1, 20), (1, 1)])
    query_starts, context_lens = batch.query_starts.clone(), batch.context_lens.clone()
    query_starts[3], context_lens[1] = 2, 0
    padded = replace(batch, query_starts=query_starts, context_lens=context_lens)
    y = attend(batch.query, batch.kv_layer, padded, scale=1.0)
    assert torch.equal(y[0], attend(batch.query, batch.kv_layer, batch, scale=1.0)[0])
    assert torch.equal(y[1], torch.zeros_like(y[1]))
    assert y[2].isnan().all()
    assert splits == [2, 2]


def test_a_launch_captured_for_long_contexts_serves_short_ones(make, splits) -> None:
    batch = make([(1, 140), (1, 3), (1, 100)])
    check(replace(batch, max_context_len=2000))
    assert splits == [10]


def test_one_sequences_nan_stays_its_own(make, splits) -> None:
    batch = make([(1, 300), (1, 290)])
    batch.kv_layer[:, int(batch.block_tables[0, 0])] = float("nan")
    y = attend(batch.query, batch.kv_layer, batch, scale=1.0)
    assert y[0].isnan().all()
    assert y[1].isfinite().all()
    assert splits == [2]


def test_the_workspace_is_a_row_and_a_level_in_float32_for_each_split(make, monkeypatch) -> None:
    batch, taken = make([(1, 600), (1, 20)]), []
    empty = torch.empty

    def counted(*size: Any, **options: Any) -> torch.Tensor:
        taken.append(empty(*size, **options))
        return taken[-1]

    monkeypatch.setattr(torch, "empty", counted)
    attend(batch.query, batch.kv_layer, batch, scale=1.0)
    monkeypatch.undo()
    num_bytes = sum(tensor.nbytes for tensor in taken) - batch.query.nbytes
    num_splits, num_rows, num_heads, head_dim = 4, 2, 2, 64
    assert num_bytes == 4 * num_splits * num_rows * num_heads * (head_dim + 1)


H200 = Card(arch=90, num_processors=132)


@pytest.mark.parametrize(
    ("num_programs", "max_context_len", "expected"),
    [
        (0, 100_000, 1),  # no sequence
        (8, 100, 1),  # too short to cut
        (8, MIN_KEYS.value * 3, 3),  # as many as have enough keys
        (8, 100_000, 64),  # a lone sequence: as many as are merged
        (64, 100_000, 8),
        (512, 100_000, 1),  # fills the card
        (5000, 100_000, 1),
    ],
)
def test_a_card_that_is_full_cuts_nothing(num_programs, max_context_len, expected) -> None:
    assert choose_num_splits(num_programs, max_context_len, H200) == expected
