"""A new model's first steps, before it serves: what is slow once shall not be slow for somebody.

A Triton kernel is compiled when it is first launched with constants that are new, which would stop every sequence for a
second. Instead of a list of kernels, which would have to follow every change of a model, the model itself runs one step
of each kind that serving can form: whatever it launches, it has launched before. Triton keeps the result on disk, so
only a machine's first start takes a minute.

Owns the choice of those steps. Knows no kernel; that their constants depend on numbers of rows only by powers of two,
on chunks beside decodes, and on long contexts, is what `tests/engine/test_warm_up.py` holds them to.
"""

from collections.abc import Iterator

from pagedd.engine.request import Request
from pagedd.engine.runner import ModelRunner
from pagedd.engine.sampling_params import SamplingParams
from pagedd.engine.sequence import Sequence
from pagedd.engine.step import ScheduledSequence, Step

# Rows of one sequence from which on a kernel cannot tell chunks apart but by their products.
_LONG_CHUNK = 64

_GREEDY = SamplingParams(max_tokens=1, temperature=0)
_FILTERED = SamplingParams(max_tokens=1, top_k=1)


def warm_up(runner: ModelRunner, num_tokens: int, max_logits_rows: int, block_size: int) -> None:
    """Runs a full chunk with as many draws as there may be, and a decode, in the pool's first blocks, still unowned.

    Args:
        num_tokens: of the largest step, as far as the pool holds them.
    """
    table = list(range(-(-num_tokens // block_size)))
    num_draws = min(num_tokens, max_logits_rows)
    chunk = _scheduled(num_tokens, num_tokens, table, num_draws, SamplingParams(max_tokens=1))
    decode = _scheduled(1, num_tokens, table, 1, SamplingParams(max_tokens=1))
    _run(runner, [Step(0, [chunk]), Step(0, [decode])])


def launch_everything(
    runner: ModelRunner, max_num_tokens: int, max_logits_rows: int, max_model_len: int, block_size: int
) -> None:
    """Runs every kind of step, all in the pool's first block, still unowned. What is computed is thrown away."""
    _run(runner, steps_of_every_kind(max_num_tokens, max_logits_rows, max_model_len, block_size))


def steps_of_every_kind(
    max_num_tokens: int, max_logits_rows: int, max_model_len: int, block_size: int
) -> Iterator[Step]:
    """By rows, by draws, by length of the context; chunks alone and beside a decode."""

    def sequences(num_rows: int, context_len: int, params: SamplingParams = _GREEDY) -> list[ScheduledSequence]:
        """One, or as many as it takes where none may be so long."""
        num_draws = num_rows if num_rows <= max_logits_rows else 1  # no more, as logits of a vocabulary are large
        items: list[ScheduledSequence] = []
        while num_rows > 0:
            chunk = min(num_rows, max_model_len)
            table = [0] * -(-max(chunk, context_len) // block_size)
            items.append(_scheduled(chunk, max(chunk, context_len), table, min(chunk, num_draws), params))
            num_rows, num_draws = num_rows - chunk, num_draws - min(chunk, num_draws)
        return items

    powers = {1 << power for power in range(max_num_tokens.bit_length())}
    for num_rows in sorted(powers | {max_num_tokens, max_logits_rows}):
        yield Step(0, sequences(num_rows, 1))
        if num_rows <= _LONG_CHUNK:
            decode, num_beside = _scheduled(1, 1, [0], 0, _GREEDY), min(num_rows, max_num_tokens - 1)
            yield Step(0, sequences(num_rows, max_model_len))
            yield Step(0, [decode, *sequences(num_beside, 1)])
            yield Step(0, [decode, *sequences(num_beside, max_model_len)])
    yield Step(0, sequences(1, 1, _FILTERED))


def _scheduled(
    num_rows: int, context_len: int, block_table: list[int], num_draws: int, params: SamplingParams
) -> ScheduledSequence:
    """The last `num_rows` of `context_len` tokens, of which the last `num_draws` are drawn from: guesses, but one."""
    draft = [0] * max(0, num_draws - 1)
    token_ids = [0] * (context_len - len(draft))
    request = Request(request_id="warm-up", prompt_token_ids=token_ids, params=params)
    sequence = Sequence(
        request=request,
        choice_index=0,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        arrival_s=0.0,
        due_s=0.0,
        priority=0,
        order=0,
        block_table=block_table,
    )
    return ScheduledSequence(sequence, context_len - num_rows, num_rows, [sequence] if num_draws else [], draft)


def _run(runner: ModelRunner, steps: Iterator[Step] | list[Step]) -> None:
    """These are no steps of serving: their time does not count."""
    for step in steps:
        runner.run(step)
        for item in step.scheduled:
            runner.close_pages(item.sequence.block_table)
    runner.seconds.update(prepare=0.0, forward=0.0, sample=0.0)
