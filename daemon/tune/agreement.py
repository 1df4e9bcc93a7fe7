"""How often a form of the KV cache leaves the model's choice as it is with 16 bits, on real text.

What follows each beginning of a text is asked of both engines, greedily; the prefix cache makes that cheap, and every
choice reads keys and values from the cache.
"""

import pydoc_data.topics
from collections.abc import Sequence
from typing import Protocol

from pagedd.daemon.tune.users import Serving
from pagedd.engine.request import Request
from pagedd.engine.sampling_params import SamplingParams

NUM_TEXTS = 8
TEXT_TOKENS = 160
# Beginnings shorter than this say little about the cache.
LEAST_TOKENS = 64
# Long enough for `TEXT_TOKENS`, whatever the tokenizer.
_TEXT_CHARS = 4000


class Encoder(Protocol):
    """What `real_texts` needs of `daemon.text.tokenizer.TextTokenizer`."""

    def encode(self, text: str) -> list[int]: ...


def real_texts(tokenizer: Encoder) -> list[list[int]]:
    """`NUM_TEXTS` texts of `TEXT_TOKENS`: pages of the help on Python's language that every CPython carries."""
    pages: dict[str, str] = pydoc_data.topics.topics
    long = sorted(title for title, page in pages.items() if len(page) >= _TEXT_CHARS)
    chosen = [long[number * len(long) // NUM_TEXTS] for number in range(NUM_TEXTS)]
    return [tokenizer.encode(pages[title][:_TEXT_CHARS])[:TEXT_TOKENS] for title in chosen]


def choices(engine: Serving, texts: Sequence[Sequence[int]]) -> list[int]:
    """The most likely token after each beginning of each text."""
    chosen: list[int] = []
    for text in texts:
        prompts = [list(text[:end]) for end in range(LEAST_TOKENS, len(text))]
        chosen += _answers(engine, prompts)
    return chosen


def agreement(chosen: Sequence[int], reference: Sequence[int]) -> float:
    """The share that is the same, 0–1."""
    return sum(one == other for one, other in zip(chosen, reference, strict=True)) / len(reference)


def _answers(engine: Serving, prompts: Sequence[list[int]]) -> list[int]:
    """The token that follows each prompt."""
    answers: dict[str, int] = {}
    for number, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=1, temperature=0.0)
        engine.add(Request(request_id=f"text-{number}", prompt_token_ids=prompt, params=params))
    while engine.has_work:
        for output in engine.step():
            [answers[output.request_id]] = output.token_ids
    return [answers[f"text-{number}"] for number in range(len(prompts))]
