"""What a request may ask for, and the engine request that becomes of it, for ZeroMQ and HTTP alike.

Owns what depends on several fields, on the model and on the caller; the range of each field is in `limits.py`. Nothing
here allocates or tokenizes: `check_message` needs only the message, `to_engine_request` its token ids as well. Types
are checked before, by the decoders of `pagedd.client.protocol` and `openai_schema.py`.
"""

import secrets
from collections.abc import Sequence
from typing import NamedTuple

from pagedd.client.errors import PageddError
from pagedd.client.protocol import Chat, ChatMessage, Generate, Sampling
from pagedd.daemon.caller import Caller
from pagedd.daemon.limits import (
    CACHE_SALT,
    CONTENT,
    GREEDY_TEMPERATURE,
    MAX_LOGPROBS,
    MESSAGES,
    PRIORITY,
    ROLE,
    SAMPLING,
)
from pagedd.engine.info import EngineInfo
from pagedd.engine.request import Request
from pagedd.engine.sampling_params import SamplingParams

DEFAULT_MAX_TOKENS = 16


def check_message(message: Generate | Chat, served_name: str) -> None:
    """Everything that can be said without the model's vocabulary and the prompt's length. Raises `PageddError`."""
    if message.model not in ("", "default", served_name):
        raise PageddError(
            "model_not_found",
            f"model {message.model[:256]!r} is not served; ask for {served_name!r} or 'default'",
            field="model",
        )
    if isinstance(message, Chat):
        _check_messages(message.messages)
    else:
        _check_prompt(message)
    PRIORITY.check(message.priority)
    CACHE_SALT.check(message.cache_salt)
    for limit in SAMPLING:
        limit.check(getattr(message.sampling, limit.field))
    sampling = message.sampling
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        raise PageddError(
            "invalid_value",
            f"min_tokens = {sampling.min_tokens}; it must be at most max_tokens, {sampling.max_tokens}",
            field="min_tokens",
        )


def check_num_messages(num_messages: int) -> None:
    """Before anything is made of them: a template needs some KiB for each. Raises `PageddError`."""
    if num_messages == 0:
        raise PageddError("empty_messages", "messages = []; give at least one message", field="messages")
    MESSAGES.check_num_items(num_messages)


def check_num_prompts(num_prompts: int, max_prompts_per_request: int) -> None:
    """Before anything is made of them. Raises `PageddError("too_many_prompts")`."""
    if num_prompts > max_prompts_per_request:
        raise PageddError(
            "too_many_prompts",
            f"{num_prompts} prompts, limit {max_prompts_per_request}; send several requests, or raise "
            "max_prompts_per_request",
            field="prompt",
        )


def check_num_choices(messages: Sequence[Generate | Chat], max_prompts_per_request: int) -> None:
    """`messages` are the prompts of one request. Raises `PageddError("too_many_prompts")`."""
    num_choices = sum(message.sampling.n for message in messages)
    if num_choices > max_prompts_per_request:
        field_name = "prompt" if len(messages) > 1 else "n"
        raise PageddError(
            "too_many_prompts",
            f"{len(messages)} prompts with {num_choices} choices together, limit {max_prompts_per_request}; "
            "send several requests, or raise max_prompts_per_request",
            field=field_name,
        )


def check_num_logprobs(messages: Sequence[Generate | Chat]) -> None:
    """`messages` are the prompts of one request, `check_message` let each pass. Raises `PageddError`."""
    num_tokens = sum(message.sampling.n * _least_max_tokens(message) for message in messages)
    num_each = max(0 if (most := message.sampling.logprobs) is None else most + 1 for message in messages)
    if num_tokens * num_each > MAX_LOGPROBS:
        raise PageddError(
            "invalid_value",
            f"{num_tokens} tokens of all answers with {num_each} log-probabilities each are {num_tokens * num_each}, "
            f"limit {MAX_LOGPROBS}; lower logprobs, max_tokens or n",
            field="logprobs",
        )


def check_text_length(message: Generate | Chat, max_token_bytes: int, max_model_len: int) -> None:
    """Refuses a text that cannot fit however it is tokenized, so that nobody waits for megabytes to be tokenized.

    `max_token_bytes` is the length of the longest token; n characters are at least n / max_token_bytes tokens.
    Raises `PageddError("prompt_too_long")`.
    """
    if isinstance(message, Chat):
        num_chars, field_name = sum(len(turn.content) for turn in message.messages), "messages"
    else:
        num_chars, field_name = len(message.prompt or ""), "prompt"
    least = -(-num_chars // max_token_bytes)
    if least >= max_model_len:
        raise PageddError(
            "prompt_too_long",
            f"prompt of {num_chars} characters, at least {least} tokens, context {max_model_len}; shorten the prompt",
            field=field_name,
        )


class TokenBounds(NamedTuple):
    """Of a message that is not tokenized: the fewest tokens of its prompt and of each choice, the most in all."""

    least_prompt: int
    least_output: int
    most: int


def token_bounds(message: Generate | Chat, max_token_bytes: int, most: int) -> TokenBounds:
    """A tokenizer makes at most one token of a byte; what a chat template adds is not counted.

    Where a chat leaves `max_tokens` out, nothing but `most` bounds them.
    """
    sampling = message.sampling
    least_output = sampling.max_tokens or max(1, sampling.min_tokens)
    if isinstance(message, Generate) and message.prompt_token_ids is not None:
        least = num_bytes = len(message.prompt_token_ids)
    else:
        texts = [turn.content for turn in message.messages] if isinstance(message, Chat) else [message.prompt or ""]
        least = -(-sum(map(len, texts)) // max_token_bytes)
        num_bytes = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
    if isinstance(message, Chat) and sampling.max_tokens is None:
        return TokenBounds(least, least_output, most)
    return TokenBounds(least, least_output, num_bytes + sampling.n * _least_max_tokens(message))


def to_engine_request(
    message: Generate | Chat,
    request_id: str,
    prompt_token_ids: list[int],
    engine: EngineInfo,
    *,
    eos_token_ids: Sequence[int],
    cache_extras: tuple[tuple[str, str], ...],
    most_output_tokens: int | None = None,
) -> Request:
    """The engine's form of a message that `check_message` let pass. Raises `PageddError` when it does not fit.

    `most_output_tokens` are what its caller's quota lets each choice ever have, which bounds `max_tokens` where it is
    not given.
    """
    prompt_field = "messages" if isinstance(message, Chat) else "prompt"
    if isinstance(message, Generate) and message.prompt_token_ids is not None:
        prompt_field = "prompt_token_ids"
    if not prompt_token_ids:
        raise PageddError("empty_prompt", "the prompt has no token; give at least one", field=prompt_field)
    max_tokens = _fitting_max_tokens(message, len(prompt_token_ids), engine, prompt_field, most_output_tokens)
    # Length first: a long list is not walked only to be refused afterwards.
    check_vocabulary(prompt_field, prompt_token_ids, engine.vocab_size)
    sampling = message.sampling
    check_vocabulary("stop_token_ids", sampling.stop_token_ids, engine.vocab_size)
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min(sampling.min_tokens, max_tokens),
        temperature=sampling.temperature if sampling.temperature >= GREEDY_TEMPERATURE else 0.0,
        top_k=max(sampling.top_k, 0) if sampling.top_k < engine.vocab_size else 0,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=_logit_bias(sampling, engine.vocab_size),
        num_logprobs=sampling.logprobs,
        seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
        stop_token_ids=_stop_token_ids(sampling, eos_token_ids),
        n=sampling.n,
    )
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt_token_ids,
        params=params,
        priority=message.priority,
        cache_extras=cache_extras,
    )


def cache_extras(message: Generate | Chat, caller: Caller, prefix_sharing: str) -> tuple[tuple[str, str], ...]:
    """What two requests need in common to share cached blocks. Each has its own tag: no salt can pass for a caller."""
    extras = [] if prefix_sharing == "all" else [("caller", caller.tag)]
    if message.cache_salt is not None:
        extras.append(("salt", message.cache_salt))
    return tuple(extras)


def _check_messages(messages: list[ChatMessage]) -> None:
    check_num_messages(len(messages))
    for message in messages:
        ROLE.check(message.role)
        CONTENT.check(message.content)


def _check_prompt(message: Generate) -> None:
    if (message.prompt is None) == (message.prompt_token_ids is None):
        code, given = ("missing_field", "neither") if message.prompt is None else ("invalid_value", "both")
        raise PageddError(
            code, f"{given} of prompt and prompt_token_ids given; give exactly one of the two", field="prompt"
        )
    if message.prompt == "":
        raise PageddError("empty_prompt", "prompt is an empty text; give at least one character", field="prompt")
    if message.prompt_token_ids == []:
        raise PageddError("empty_prompt", "prompt_token_ids is empty; give at least one id", field="prompt_token_ids")


def _fitting_max_tokens(
    message: Generate | Chat, num_prompt_tokens: int, engine: EngineInfo, prompt_field: str, most: int | None
) -> int:
    """`max_tokens` as asked, or what its absence means. Raises when prompt and output together do not fit."""
    room = min(engine.max_model_len, engine.max_request_tokens) - num_prompt_tokens
    asked = message.sampling.max_tokens
    # The prompt needs room for one token of output at least, and for as many as were demanded.
    needed = asked if asked is not None else max(1, message.sampling.min_tokens)
    if needed > room:
        _refuse_length(num_prompt_tokens, needed, engine, prompt_field)
    if asked is not None:
        return asked
    if (num_top := message.sampling.logprobs) is not None:
        room = max(needed, min(room, MAX_LOGPROBS // (message.sampling.n * (num_top + 1))))
    wanted = room if isinstance(message, Chat) else max(DEFAULT_MAX_TOKENS, message.sampling.min_tokens)
    if most is not None:
        wanted = max(needed, min(wanted, most))
    return min(wanted, room)


def _least_max_tokens(message: Generate | Chat) -> int:
    """What `max_tokens` is, or at least becomes."""
    sampling = message.sampling
    if sampling.max_tokens is not None:
        return sampling.max_tokens
    return max(1 if isinstance(message, Chat) else DEFAULT_MAX_TOKENS, sampling.min_tokens)


def _refuse_length(num_prompt_tokens: int, num_output_tokens: int, engine: EngineInfo, prompt_field: str) -> None:
    total = num_prompt_tokens + num_output_tokens
    asked = f"prompt {num_prompt_tokens} + output {num_output_tokens} = {total} tokens"
    if total > engine.max_model_len:
        raise PageddError(
            "prompt_too_long",
            f"{asked}, context {engine.max_model_len}; shorten the prompt or lower max_tokens",
            field=prompt_field,
        )
    raise PageddError(
        "exceeds_kv_pool",
        f"{asked}, the KV pool holds {engine.max_request_tokens} ({engine.num_blocks} blocks of {engine.block_size}); "
        "shorten the request, or give the pool more memory",
        field=prompt_field,
    )


def check_vocabulary(field_name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if not token_ids:
        return
    for token_id in (min(token_ids), max(token_ids)):
        if not 0 <= token_id < vocab_size:
            raise PageddError(
                "token_out_of_vocabulary",
                f"{field_name} has id {token_id}; ids are 0 to {vocab_size - 1}",
                field=field_name,
            )


def _logit_bias(sampling: Sampling, vocab_size: int) -> dict[int, float]:
    biases: dict[int, float] = {}
    for key, bias in (sampling.logit_bias or {}).items():
        # A very long run of digits would take `int` a long time, or raise.
        if not key.removeprefix("-").isdecimal() or not key.isascii() or len(key) > 20:
            raise PageddError(
                "invalid_value", f"logit_bias has key {key[:32]!r}; keys are token ids as text", field="logit_bias"
            )
        biases[int(key)] = float(bias)
    check_vocabulary("logit_bias", list(biases), vocab_size)
    return biases


def _stop_token_ids(sampling: Sampling, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
    model_ends = () if sampling.ignore_eos else tuple(eos_token_ids)
    return tuple(dict.fromkeys((*model_ends, *sampling.stop_token_ids)))
