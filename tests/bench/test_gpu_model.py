"""What the whole model's figures are held against."""

from types import SimpleNamespace

import torch

from pagedd.bench.gpu_model import bytes_of_a_step


def test_a_decode_step_reads_every_weight_but_the_embedding() -> None:
    loaded = SimpleNamespace(
        model=SimpleNamespace(weight_bytes=1000),
        config=SimpleNamespace(vocab_size=10, hidden_size=8),
        dtype=torch.bfloat16,
    )
    assert bytes_of_a_step(loaded) == 1000 - 10 * 8 * 2  # type: ignore[arg-type]
