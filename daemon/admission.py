"""What a request may ask for: every limit in one table, for ZeroMQ and HTTP alike, and the engine request.

Owns ranges, their meanings and their refusals. `docs/api.md` prints `LIMITS` and the tests walk over it. Nothing here
allocates or tokenizes: `check_message` needs only the message, `to_engine_request` its token ids as well. Types are
checked before, by the decoders of `pagedd.client.protocol` and `openai_schema.py`.
"""

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pagedd.client.errors import PageddError
from pagedd.client.protocol import Chat, ChatMessage, Generate, Sampling
from pagedd.daemon.caller import Caller
from pagedd.engine.info import EngineInfo
from pagedd.engine.request import Request
from pagedd.engine.sampling_params import SamplingParams

DEFAULT_MAX_TOKENS = 16
# Below this a softmax in float32 is one-hot up to rounding, and dividing by it would overflow.
GREEDY_TEMPERATURE = 1e-4
# Of one request, all its answers together: some MiB while they are kept, tens of MiB as JSON.
MAX_LOGPROBS = 1 << 18
_MAX_INT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Limit:
    """The range of one field. A limit on numbers holds for each number of a list, and for each value of a mapping.

    Attributes:
        field: its name on the wire, the same in both APIs.
        low, high: inclusive, unless `low_is_open`.
        min_items, max_items: of a list or mapping.
        max_chars: of a text, or of each text of a list; a text is never empty.
        in_vocabulary: the numbers (or a mapping's keys) are token ids of the model.
    """

    field: str
    meaning: str
    low: float | None = None
    high: float | None = None
    low_is_open: bool = False
    min_items: int = 0
    max_items: int | None = None
    max_chars: int | None = None
    in_vocabulary: bool = False

    @property
    def range(self) -> str:
        """For people: `(0, 1]`, `>= 1`, `at most 16 items, each of 1 to 256 characters`."""
        parts = []
        if self.min_items:
            parts.append(f"at least {self.min_items} item")
        if self.max_items is not None:
            parts.append(f"at most {self.max_items} items")
        if self.max_chars is not None:
            each = "each of " if self.max_items is not None else ""
            parts.append(f"{each}1 to {self.max_chars} characters")
        if self.in_vocabulary:
            parts.append("token ids of the model")
        if self.low is not None and self.high is not None:
            values = "values in " if self.max_items is not None else ""
            parts.append(f"{values}{'(' if self.low_is_open else '['}{self.low}, {self.high}]")
        elif self.low is not None:
            parts.append(f"{'>' if self.low_is_open else '>='} {self.low}")
        return ", ".join(parts)

    def check(self, value: Any) -> None:
        """Raises `PageddError("invalid_value")` naming field, value and range. `None` is always allowed: not given."""
        match value:
            case None:
                return
            case str():
                if not value or (self.max_chars is not None and len(value) > self.max_chars):
                    self._refuse(f"a text of {len(value)} characters")
            case int() | float():
                if not self._holds(value):
                    self._refuse(value)
            case list() | dict():
                self.check_num_items(len(value))
                for item in value.values() if isinstance(value, dict) else value:
                    self.check(item)

    def check_num_items(self, num_items: int) -> None:
        """Raises `PageddError("invalid_value")`, as `check` would for a list or mapping of so many."""
        if num_items < self.min_items or (self.max_items is not None and num_items > self.max_items):
            self._refuse(f"{num_items} items")

    def _holds(self, number: float) -> bool:
        if isinstance(number, float) and not math.isfinite(number):
            return False
        if self.low is not None and (number < self.low or (self.low_is_open and number == self.low)):
            return False
        return self.high is None or number <= self.high

    def _refuse(self, value: object) -> None:
        # JSON's integers have any length, and Python refuses to write down the longest.
        shown = "a number of over 20 digits" if isinstance(value, int) and abs(value) > 10**20 else value
        raise PageddError("invalid_value", f"{self.field} = {shown}; accepted: {self.range}", field=self.field)


_SAMPLING = (
    Limit(
        "max_tokens",
        "Most tokens to produce. Absent: 16 for a completion, the rest of the context for a chat; less if less fits. "
        "A value that does not fit beside the prompt is refused, not cut.",
        low=1,
        high=_MAX_INT,
    ),
    Limit(
        "min_tokens",
        "Neither a stop id nor a stop string ends the text before; at most `max_tokens`.",
        low=0,
        high=_MAX_INT,
    ),
    Limit("n", "Choices. They share the prompt's blocks.", low=1, high=128),
    Limit(
        "temperature",
        f"Divides the logits. 0, and anything below {GREEDY_TEMPERATURE}, is greedy: ties go to the lowest id.",
        low=0,
        high=100,
    ),
    Limit(
        "top_k",
        "Keep the k most likely tokens. 0 and -1 keep all; more than the vocabulary keeps all.",
        low=-1,
        high=_MAX_INT,
    ),
    Limit(
        "top_p",
        "Keep the smallest set of tokens whose probability reaches it. 1 is off.",
        low=0,
        high=1,
        low_is_open=True,
    ),
    Limit("min_p", "Keep tokens at least this fraction as likely as the likeliest. 0 is off.", low=0, high=1),
    Limit(
        "repetition_penalty",
        "Divides positive, multiplies negative logits of tokens in prompt or output. 1 is off.",
        low=0,
        high=10,
        low_is_open=True,
    ),
    Limit("presence_penalty", "Subtracted from the logit of each token in the output.", low=-2, high=2),
    Limit("frequency_penalty", "Subtracted from a token's logit once per occurrence in the output.", low=-2, high=2),
    Limit(
        "logit_bias",
        "Token id (as a string) to what is added to its logit.",
        low=-100,
        high=100,
        max_items=1024,
        in_vocabulary=True,
    ),
    Limit(
        "logprobs",
        "0 gives the chosen token's log-probability, k the k best as well; with all prompts, `n` and `max_tokens` "
        f"{MAX_LOGPROBS} at most.",
        low=0,
        high=20,
    ),
    Limit(
        "seed",
        "The same seed draws the same from the same logits; see Repeatable answers. Absent: one is drawn.",
        low=-(2**63),
        high=2**63 - 1,
    ),
    Limit("stop", "Texts that end the answer; they are not part of it.", max_items=16, max_chars=256),
    Limit("stop_token_ids", "Token ids that end the answer.", max_items=1024, in_vocabulary=True),
)
_PRIORITY = Limit("priority", "Higher is more urgent; the default is 0.", low=-100, high=100)
_CACHE_SALT = Limit("cache_salt", "Only requests with the same salt (and caller) share cached prefixes.", max_chars=256)
_MESSAGES = Limit("messages", "The conversation, oldest first.", min_items=1, max_items=16_384)
_CONTENT = Limit("messages.content", "A message's text; over HTTP also a list of text parts.", max_chars=8 << 20)
_ROLE = Limit("messages.role", "As the model's chat template knows it.", max_chars=64)

LIMITS: Mapping[str, Limit] = {
    limit.field: limit for limit in (*_SAMPLING, _PRIORITY, _CACHE_SALT, _MESSAGES, _ROLE, _CONTENT)
}


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
    _PRIORITY.check(message.priority)
    _CACHE_SALT.check(message.cache_salt)
    for limit in _SAMPLING:
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
    _MESSAGES.check_num_items(num_messages)


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
        _ROLE.check(message.role)
        _CONTENT.check(message.content)


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
