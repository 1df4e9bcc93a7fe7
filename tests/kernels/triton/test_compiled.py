"""Compiling ahead of serving: everything that a model launches, and nothing where there is no card."""

import pytest
import torch

from pagedd.kernels.kv_form import FORMS
from pagedd.kernels.triton import compiled
from pagedd.kernels.triton.compiled import ModelSizes, compile_kernels, launch_all
from pagedd.kernels.triton.linear import packed_linear
from pagedd.kernels.triton.paged_attention import paged_attention


def tiny_model(kv_form: str = "bf16", weight_bits: int | None = 4, **options: object) -> ModelSizes:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
    return ModelSizes(
        **sizes,
        vocab_size=100,
        block_size=16,
        dtype=torch.bfloat16,
        kv_form=FORMS[kv_form],
        weight_bits=weight_bits,
        max_num_rows=20,
        max_context_len=512,
        **options,
    )


def test_nothing_is_launched_without_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "launch_all", lambda model, device: pytest.fail("launched"))
    assert not compile_kernels(tiny_model(), torch.device("cpu"))


@pytest.mark.parametrize("kv_form", ["bf16", "k8v4", "int4"])
def test_everything_that_a_model_launches_runs_once(kv_form: str) -> None:
    launch_all(tiny_model(kv_form, has_head_norms=True, sliding_windows=frozenset({24})), torch.device("cpu"))


def test_products_meet_every_power_of_two_of_rows_and_attention_short_and_long_contexts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row_counts, contexts = set(), set()

    def spy_linear(x: torch.Tensor, *others: object) -> torch.Tensor:
        row_counts.add(x.shape[0])
        return packed_linear(x, *others)

    def spy_attention(query: torch.Tensor, kv_layer: object, batch: object, **options: object) -> torch.Tensor:
        contexts.add((batch.max_query_len, batch.num_decodes, batch.max_context_len))
        return paged_attention(query, kv_layer, batch, **options)

    monkeypatch.setattr(compiled, "packed_linear", spy_linear)
    monkeypatch.setattr(compiled, "paged_attention", spy_attention)
    launch_all(tiny_model(), torch.device("cpu"))
    assert row_counts == {1, 2, 4, 8, 16}
    assert {(1, 1, 16), (1, 1, 512), (64, 0, 64), (64, 1, 512)} <= contexts


def test_products_are_left_to_torch_where_weights_are_not_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "packed_linear", lambda *arguments: pytest.fail("launched"))
    launch_all(tiny_model(weight_bits=None), torch.device("cpu"))
