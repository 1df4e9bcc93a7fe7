"""The paper roofline: sums that can be checked by hand, and the page that quotes them."""

from pathlib import Path

import pytest

from pagedd.bench.report import markdown
from pagedd.bench.roofline import (
    CARDS,
    CONTEXT_LEN,
    LLAMA_8B,
    Card,
    Work,
    decode_step,
    file_rows,
    kernel_rows,
    launch_rows,
    memory_gib,
    prefill_rows,
    step_rows,
)
from pagedd.kernels.triton import card, linear
from pagedd.kernels.triton.split_decode import choose_num_splits

PAGE = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()


def test_a_floor_is_the_slower_of_moving_and_computing() -> None:
    card = Card("a", gb_per_s=100, tflop_per_s=1, memory_gib=8)
    assert Work("x", num_bytes=1e9, operations=1e9).floor_ms(card) == 10
    assert Work("x", num_bytes=1e8, operations=1e10).floor_ms(card) == 10


def test_the_sizes_are_those_of_an_8b_model() -> None:
    num_weights = 32 * LLAMA_8B.layer_weights + 2 * LLAMA_8B.head_weights
    assert num_weights == pytest.approx(8.03e9, rel=1e-3)


def test_one_stream_reads_each_weight_and_each_key_and_value_once() -> None:
    work = {part.kernel: part for part in decode_step(1, kv_form="bf16")}
    assert work["linear"].num_bytes == pytest.approx(32 * LLAMA_8B.layer_weights * 20 / 32, rel=1e-2)
    assert work["paged_attention"].num_bytes == pytest.approx(4096 * 131072, rel=1e-2)


def test_an_8_bit_cache_takes_little_more_than_half_of_a_16_bit_one() -> None:
    weights = memory_gib(0, "bf16")
    assert (memory_gib(8, "int8") - weights) / (memory_gib(8, "bf16") - weights) == pytest.approx(132 / 256)


def test_the_page_shows_these_tables_and_claims_nothing_measured() -> None:
    for rows in (kernel_rows(), step_rows(), prefill_rows(), launch_rows(), file_rows()):
        assert markdown(rows) in PAGE, "paste the output of: python -P -m pagedd.bench.roofline --markdown"
    assert "none is a\nmeasurement" in PAGE
    assert {row["card"] for row in step_rows()} == {card.name for card in CARDS}


def test_the_page_counts_the_launches_that_a_card_adds_by_cutting() -> None:
    h200, layer = card.Card(90, 132), launch_rows()[0]
    whole, shape = layer["of a step, one by one"], LLAMA_8B
    assert isinstance(whole, int)

    def is_cut(num_rows: int, out_features: int, in_features: int) -> bool:
        _, chosen, constants = linear._choose(h200.arch, 4, 0, num_rows)
        num_tiles = -(-out_features // constants["OUTS"]) * -(-num_rows // constants["ROWS"])
        num_steps = -(-in_features // 32 // constants["GROUPS"])
        return linear._steps_per_split(h200, chosen, num_tiles, num_steps) < num_steps

    counts = []
    for batch in (1, 8, 64):
        query = shape.heads * shape.head_dim
        qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        products = [(qkv, shape.hidden), (shape.hidden, query), (2 * shape.inner, shape.hidden)]
        products.append((shape.hidden, shape.inner))
        in_a_layer = sum(is_cut(batch, *sizes) for sizes in products)
        in_a_layer += choose_num_splits(batch * shape.kv_heads, CONTEXT_LEN, h200) > 1
        counts.append(whole + shape.layers * in_a_layer + is_cut(batch, shape.vocab, shape.hidden))
    assert "has {} launches a step on an H200 at batch 1, {} at 8, {} at 64".format(*counts) in PAGE
