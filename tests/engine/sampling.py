"""Sequences and their rows of logits, as a sampler gets them."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from pagedd.engine.request import Request
from pagedd.engine.sampler import Sampler
from pagedd.engine.sampling_params import SamplingParams
from pagedd.engine.sequence import Sequence
from pagedd.engine.step import Sampled
from pagedd.kernels import cpu

# How a CPU draws: by torch's operations, or by the C++ extension.
WAYS = ("torch", "C++")


@contextmanager
def drawing_by(way: str) -> Iterator[None]:
    extension = cpu.load() if way == "C++" else None
    with patch.object(cpu, "loaded", lambda: extension):
        yield


def make_sequence(
    params: SamplingParams, prompt: list[int] | None = None, output: list[int] | None = None, choice_index: int = 0
) -> Sequence:
    """By default with a prompt of one token, 0, and no output."""
    prompt = prompt or [0]
    return Sequence(
        request=Request(request_id="r", prompt_token_ids=prompt, params=params),
        choice_index=choice_index,
        token_ids=prompt + (output or []),
        num_prompt_tokens=len(prompt),
        arrival_s=0.0,
        due_s=0.0,
        order=0,
        priority=0,
    )


def greedy(**changes) -> SamplingParams:
    return SamplingParams(max_tokens=100, temperature=0.0, **changes)


def drawn(**changes) -> SamplingParams:
    return SamplingParams(max_tokens=100, **changes)


def sample_row(logits: list[float], sequence: Sequence) -> Sampled:
    """What is drawn from these logits, by a sampler that has seen nothing before."""
    return Sampler().sample(torch.tensor([logits]), [sequence])[0]
