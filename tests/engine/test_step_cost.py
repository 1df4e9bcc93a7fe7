"""What a step costs outside the forward pass: calls are counted, not seconds, so that no clock decides."""

import sys
from collections.abc import Callable

import pytest
import torch

from pagedd.engine.sampler import Sampler
from pagedd.engine.sampling_params import SamplingParams


def num_calls(work: Callable[[], object]) -> int:
    """Python and C function calls that `work` makes."""
    count = 0

    def profile(frame, event, argument) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def decoding(bench, num_sequences: int, num_blocks: int = 2000, num_guesses: int = 0):
    b = bench(
        num_blocks=num_blocks,
        max_num_seqs=num_sequences,
        max_num_batched_tokens=4096,
        max_model_len=400,
        num_speculative_tokens=num_guesses,
    )
    for i in range(num_sequences):
        b.add(f"r{i}", [i % 50, 2, 3], max_tokens=200)
    for _ in range(3):
        b.step()
    return b


def schedule_and_commit(b) -> int:
    step = None

    def schedule() -> None:
        nonlocal step
        step = b.scheduler.schedule()

    cost = num_calls(schedule)
    sampled = b.runner.run(step)
    return cost + num_calls(lambda: b.scheduler.commit(step, sampled))


@pytest.mark.parametrize(("num_guesses", "limit"), [(0, 120), (7, 200)])
def test_scheduling_and_commit_grow_no_worse_than_linearly_with_running_sequences(bench, num_guesses, limit) -> None:
    few, many = (schedule_and_commit(decoding(bench, count, num_guesses=num_guesses)) / count for count in (8, 128))
    assert many < 1.2 * few
    assert many < limit


def test_the_size_of_the_pool_does_not_show(bench) -> None:
    small, large = (schedule_and_commit(decoding(bench, 32, num_blocks)) for num_blocks in (200, 20_000))
    assert large == pytest.approx(small, rel=0.02)


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_sampling_costs_the_same_calls_after_a_long_answer_as_after_a_short_one(bench, penalty) -> None:
    sampler, logits = Sampler(), torch.randn(32, 64)

    def cost(num_tokens: int) -> int:
        b = bench(num_blocks=2000, max_num_seqs=32, max_num_batched_tokens=4096, max_model_len=400)
        for i in range(32):
            b.add(f"r{i}", [1, 2, 3], max_tokens=300, repetition_penalty=penalty, temperature=0.0)
        b.step()
        sequences = list(b.scheduler.live_sequences())
        for sequence in sequences:
            sequence.token_ids += [7] * num_tokens
        sampler.sample(logits, sequences)  # reads the tokens so far
        for sequence in sequences:
            sequence.token_ids.append(9)
        return num_calls(lambda: sampler.sample(logits, sequences))

    assert SamplingParams(max_tokens=1, repetition_penalty=penalty).needs_token_counts == (penalty != 1.0)
    assert cost(250) <= 1.1 * cost(5)
