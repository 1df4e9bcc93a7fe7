"""OpenAI's request bodies as pagedd's own messages, so that both APIs share one admission.

Owns the JSON fields and their types: unknown fields are ignored (`ignored_fields.py` says which), known ones are typed,
and known ones that ask for what pagedd does not do are refused by name. Ranges are `limits.py`'s. Answers are
`openai_responses.py`'s.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import msgspec

from pagedd.client.errors import PageddError
from pagedd.client.protocol import Chat, ChatMessage, Generate, Sampling
from pagedd.daemon.admission import check_num_messages, check_num_prompts


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None


class CommonBody(msgspec.Struct, kw_only=True):
    """What completions and chat completions have in common. `null` is "not given" for every field."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    cache_salt: str | None = None
    # Known, and refused unless they ask for nothing: see `NEUTRAL_VALUES`.
    use_beam_search: Any = None
    prompt_logprobs: Any = None
    logits_processors: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None
    response_format: Any = None


_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT = {"type": "string", "minLength": 1}
# What `_prompts` takes, for those who read the API's document.
_PROMPT_SCHEMA = {
    "anyOf": [_TEXT, _TOKEN_IDS, *({"type": "array", "items": kind, "minItems": 1} for kind in (_TEXT, _TOKEN_IDS))]
}


class CompletionBody(CommonBody, kw_only=True):
    """`POST /v1/completions`. `prompt` is a text, a list of texts, a list of ids or a list of lists of ids."""

    prompt: Annotated[str | list[Any], msgspec.Meta(extra_json_schema=_PROMPT_SCHEMA)]
    logprobs: int | None = None
    parse_special: bool | None = None
    best_of: int | None = None
    echo: Any = None
    suffix: Any = None
    prompt_embeds: Any = None


class TextPart(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None


class Turn(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[TextPart]
    name: str | None = None
    tool_calls: Any = None
    function_call: Any = None


class ChatBody(CommonBody, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[Turn]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """`POST /tokenize`: a text, or a conversation through the chat template."""

    prompt: str | None = None
    messages: list[Turn] | None = None
    model: str | None = None
    parse_special: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


class LoadBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Not OpenAI's: `POST /load`, with the fields of `protocol.Load`."""

    model: str
    served_name: str | None = None


# Values of a known but unsupported field that ask for nothing, besides `null`.
NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "prompt_logprobs": (),
    "logits_processors": ([],),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": ({},),
    "response_format": ({"type": "text"},),
    "echo": (False,),
    "suffix": ("",),
    "prompt_embeds": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": ([], ["text"]),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "tool_calls": ([],),
}
UNSUPPORTED_FIELDS = tuple(NEUTRAL_VALUES)

_SAMPLING_FIELDS = tuple(name for name in Sampling.__struct_fields__ if name not in ("stop", "logprobs"))

_Body = TypeVar("_Body")
_COMPLETION = msgspec.json.Decoder(CompletionBody)
_CHAT = msgspec.json.Decoder(ChatBody)
_TOKENIZE = msgspec.json.Decoder(TokenizeBody)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeBody)
_LOAD = msgspec.json.Decoder(LoadBody)


@dataclass(frozen=True, slots=True)
class OpenAIRequest:
    """One HTTP request as messages, numbered by their `id`s `"0"`, `"1"`, …

    Attributes:
        include_usage: the stream ends with a chunk that holds the usage.
        renamed: protocol field -> the field that this API's user wrote, for errors.
    """

    messages: list[Generate | Chat]
    stream: bool
    include_usage: bool
    renamed: Mapping[str, str] = field(default_factory=dict)


def completion_request(raw: bytes | bytearray, max_prompts: int) -> OpenAIRequest:
    """Raises `PageddError`: more than `max_prompts` are refused before a message is made of any."""
    body = _decode(_COMPLETION, raw)
    _check_unsupported(body)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise PageddError("unsupported_field", f"best_of = {body.best_of}; only n choices are made", field="best_of")
    sampling = _sampling(body, body.logprobs)
    stream = bool(body.stream)
    messages: list[Generate | Chat] = [
        Generate(
            id=str(number),
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=None if isinstance(prompt, str) else prompt,
            sampling=sampling,
            model=body.model or "default",
            priority=body.priority or 0,
            stream=stream,
            parse_special=bool(body.parse_special),
            cache_salt=body.cache_salt,
        )
        for number, prompt in enumerate(_prompts(body.prompt, max_prompts))
    ]
    return OpenAIRequest(messages, stream, _include_usage(body), {"prompt_token_ids": "prompt"})


def chat_request(raw: bytes | bytearray) -> OpenAIRequest:
    """Raises `PageddError`."""
    body = _decode(_CHAT, raw)
    _check_unsupported(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise PageddError(
            "invalid_value", f"top_logprobs = {body.top_logprobs}; it needs logprobs = true", field="top_logprobs"
        )
    renamed = {"logprobs": "top_logprobs"}
    if body.max_completion_tokens is not None:
        body.max_tokens = body.max_completion_tokens
        renamed["max_tokens"] = "max_completion_tokens"
    stream = bool(body.stream)
    message = Chat(
        id="0",
        messages=_turns(body.messages),
        sampling=_sampling(body, (body.top_logprobs or 0) if body.logprobs else None),
        model=body.model or "default",
        priority=body.priority or 0,
        stream=stream,
        cache_salt=body.cache_salt,
    )
    return OpenAIRequest([message], stream, _include_usage(body), renamed)


def tokenize_request(raw: bytes | bytearray) -> Generate | Chat:
    """The message whose prompt is to be tokenized. Raises `PageddError`."""
    body = _decode(_TOKENIZE, raw)
    model = body.model or "default"
    if (body.prompt is None) == (body.messages is None):
        code, given = ("missing_field", "neither") if body.prompt is None else ("invalid_value", "both")
        raise PageddError(code, f"{given} of prompt and messages given; give exactly one of the two", field="prompt")
    if body.messages is not None:
        return Chat(id="0", messages=_turns(body.messages), model=model)
    return Generate(id="0", prompt=body.prompt, model=model, parse_special=bool(body.parse_special))


def detokenize_request(raw: bytes | bytearray) -> list[int]:
    """Token ids. Raises `PageddError`."""
    return _decode(_DETOKENIZE, raw).tokens


def load_request(raw: bytes | bytearray) -> LoadBody:
    """Which model to serve. Raises `PageddError`."""
    return _decode(_LOAD, raw)


def decoding_error(error: msgspec.DecodeError) -> PageddError:
    """What a decoder of msgspec found, as a refusal that names the field. For both APIs."""
    text = str(error)
    if not isinstance(error, msgspec.ValidationError):
        return PageddError("malformed_message", text)
    path = re.search(r" - at (?:`key` in )?`\$([^`]*)`$", text)
    # `$.sampling.top_k` is `top_k` and `$.messages[0].content` is `messages.content`, in both APIs.
    name = re.sub(r"\[[^\]]*\]", "", path.group(1)).removeprefix(".").removeprefix("sampling.") if path else ""
    if missing := re.match(r"Object missing required field `(\w+)`", text):
        return PageddError("missing_field", text, field=f"{name}.{missing.group(1)}".removeprefix("."))
    code = "invalid_type" if text.startswith("Expected `") else "invalid_value"
    return PageddError(code, text, field=name or None)


def _decode(decoder: "msgspec.json.Decoder[_Body]", raw: bytes | bytearray) -> _Body:
    try:
        return decoder.decode(raw)
    except msgspec.DecodeError as error:
        raise decoding_error(error) from error
    except (RecursionError, UnicodeDecodeError) as error:
        raise PageddError("malformed_message", str(error)) from error


def _check_unsupported(body: msgspec.Struct) -> None:
    for name in body.__struct_fields__:
        value = getattr(body, name)
        if name in NEUTRAL_VALUES and value is not None and not _asks_for_nothing(value, NEUTRAL_VALUES[name]):
            raise PageddError("unsupported_field", f"{name} is not supported; leave it out", field=name)


def _asks_for_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    # By type as well: to Python, 0 is False.
    return any(type(value) is type(known) and value == known for known in neutral)


def _include_usage(body: CommonBody) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)


def _sampling(body: CommonBody, logprobs: int | None) -> Sampling:
    given = {name: value for name in _SAMPLING_FIELDS if (value := getattr(body, name)) is not None}
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return Sampling(**given, stop=stop, logprobs=logprobs)


def _prompts(prompt: str | list[Any], max_prompts: int) -> Sequence[str | list[int]]:
    """Each prompt, as text or as ids."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise PageddError("empty_prompt", "prompt = []; give a text or token ids", field="prompt")
    first = prompt[0]
    if isinstance(first, str | list):
        check_num_prompts(len(prompt), max_prompts)
    if isinstance(first, str):
        return _convert(prompt, list[str])
    if isinstance(first, list):
        return _convert(prompt, list[list[int]])
    return [_convert(prompt, list[int])]


def _convert(prompt: list[Any], kind: type[_Body]) -> _Body:
    try:
        return msgspec.convert(prompt, kind)
    except msgspec.ValidationError as error:
        refused = decoding_error(error)
        raise PageddError(refused.code, f"prompt: {refused.message}", field="prompt") from error


def _turns(turns: list[Turn]) -> list[ChatMessage]:
    check_num_messages(len(turns))
    for turn in turns:
        _check_unsupported(turn)
    return [ChatMessage(role=turn.role, content=_content(turn.content), name=turn.name) for turn in turns]


def _content(content: str | list[TextPart]) -> str:
    if isinstance(content, str):
        return content
    for part in content:
        if part.type != "text":
            raise PageddError(
                "unsupported_field",
                f"a content part of type {part.type[:64]!r}; only text is supported",
                field="messages.content",
            )
        if part.text is None:
            raise PageddError("missing_field", "a text part without text", field="messages.content.text")
    # Parts are paragraphs of one message; other servers put a line between them, too.
    return "\n".join(part.text or "" for part in content)
