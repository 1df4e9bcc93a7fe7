"""What the whole model's figures are held against."""

from types import SimpleNamespace

import torch

from pagedd.bench.gpu_model import bytes_of_a_step


def test_a_decode_step_reads_every_weight_but_the_embedding() -> None:
    assert bytes_of_a_step(1000, SimpleNamespace(vocab=10, hidden=8), torch.bfloat16) == 1000 - 10 * 8 * 2
