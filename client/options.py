"""The keyword arguments of `generate` and `chat`, typed: those of `protocol.Sampling`, which a test holds them to.

Owns one convenience: a single stop may be given as a string.
"""

from typing import TypedDict, Unpack

from pagedd.client.protocol import Sampling


class SamplingOptions(TypedDict, total=False):
    """How to choose tokens; `protocol.Sampling` documents each."""

    max_tokens: int | None
    min_tokens: int
    n: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: dict[str, float] | None
    logprobs: int | None
    seed: int | None
    stop: str | list[str]
    stop_token_ids: list[int]
    ignore_eos: bool


def make_sampling(**options: Unpack[SamplingOptions]) -> Sampling:
    """Raises `TypeError` for a name that `Sampling` does not have. The daemon checks types and ranges."""
    stop = options.get("stop")
    if isinstance(stop, str):
        options["stop"] = [stop]
    return Sampling(**options)  # type: ignore[arg-type]  # `stop` is a list by now.
