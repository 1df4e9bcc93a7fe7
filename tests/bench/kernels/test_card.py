"""The kernels' benchmarks: what they would measure, without a card to measure."""

from types import ModuleType

import pytest
import torch

from pagedd.bench.kernels import card, linear, rms_norm, rope_kv, silu_and_mul, top_k_top_p

CPU = torch.device("cpu")
SMALL: list[tuple[ModuleType, dict[str, object]]] = [
    (rms_norm, {"SIZE": 64}),
    (silu_and_mul, {"SIZE": 64}),
    (linear, {"SHAPES": ((64, 96),), "ROW_COUNTS": (1, 5)}),
    (top_k_top_p, {"VOCAB_SIZE": 300, "ROW_COUNTS": (1, 2)}),
    (rope_kv, {"NUM_HEADS": 2, "NUM_KV_HEADS": 1, "HEAD_DIM": 32, "TOKEN_COUNTS": (1, 5)}),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_a_benchmark_says_so_and_what_can_be_had_instead() -> None:
    with pytest.raises(SystemExit, match="kernels-aot"):
        rms_norm.main([])


@pytest.mark.parametrize(("bench", "sizes"), SMALL, ids=[bench.__name__ for bench, _ in SMALL])
def test_every_case_is_launched_and_told(
    bench: ModuleType, sizes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch_once(launch, device) -> float:
        launch()
        return 1e-3

    monkeypatch.setattr(card, "seconds_of", launch_once)
    for name, size in sizes.items():
        monkeypatch.setattr(bench, name, size)
    rows = bench.measure(CPU, 1.0)
    assert len({row["case"] for row in rows}) == len(rows) > 1
    assert all(row["microseconds"] == 1000 and row["GB/s"] > 0 for row in rows)


def test_a_row_says_what_was_moved_and_computed_in_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "seconds_of", lambda launch, device: 2e-3)
    assert card.row("case", lambda: None, CPU, 4_000_000, 10e9, 6_000_000_000) == {
        "case": "case",
        "microseconds": 2000.0,
        "GB/s": 2.0,
        "of a copy's": "20%",
        "TFLOP/s": 3.0,
    }
    assert card.row("case", lambda: None, CPU, 4_000_000, 10e9)["TFLOP/s"] is None
