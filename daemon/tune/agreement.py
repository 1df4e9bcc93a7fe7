"""How often a form of the KV cache leaves the model's choice as it is with 16 bits, on text of the model's own.

The texts are drawn by the 16-bit engine at a low temperature. What follows each beginning of a text is then asked of
both engines, greedily; the prefix cache makes that cheap, and every choice reads keys and values from the cache.
"""

import random
from collections.abc import Sequence

from pagedd.daemon.tune.users import Serving
from pagedd.engine.request import Request
from pagedd.engine.sampling_params import SamplingParams

# What each form is known to reach on models that bear it; more than on foreign text, of which a model is less sure.
AGREEMENT_BARS = {"int8": 0.97, "fp8": 0.94, "k8v4": 0.94, "int4": 0.92}

NUM_TEXTS = 6
TEXT_TOKENS = 160
# Text of a small model at 1 is so random that its most likely token hangs on the last bit.
TEMPERATURE = 0.6
# Beginnings shorter than this say little about the cache.
LEAST_TOKENS = 64


def draw_texts(engine: Serving, vocab_size: int) -> list[list[int]]:
    """`NUM_TEXTS` texts of the model's own, each after one random token."""
    draw = random.Random(5)
    prompts = [[draw.randrange(vocab_size)] for _ in range(NUM_TEXTS)]
    answers = _answers(engine, prompts, TEXT_TOKENS, temperature=TEMPERATURE)
    return [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]


def choices(engine: Serving, texts: Sequence[Sequence[int]]) -> list[int]:
    """The most likely token after each beginning of each text."""
    chosen: list[int] = []
    for text in texts:
        prompts = [list(text[:end]) for end in range(LEAST_TOKENS, len(text))]
        chosen += [ids[0] for ids in _answers(engine, prompts, 1, temperature=0.0)]
    return chosen


def agreement(chosen: Sequence[int], reference: Sequence[int]) -> float:
    """The share that is the same, 0–1."""
    return sum(one == other for one, other in zip(chosen, reference, strict=True)) / len(reference)


def _answers(engine: Serving, prompts: Sequence[list[int]], max_tokens: int, temperature: float) -> list[list[int]]:
    answers: dict[str, list[int]] = {}
    for number, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=number)
        answers[f"text-{number}"] = []
        engine.add(Request(request_id=f"text-{number}", prompt_token_ids=prompt, params=params))
    while engine.has_work:
        for output in engine.step():
            answers[output.request_id] += output.token_ids
    return list(answers.values())
