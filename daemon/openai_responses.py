"""pagedd's messages as OpenAI's answers: whole bodies, stream chunks, usage, log-probabilities.

Owns the JSON that leaves. Knows nothing of connections; `http_generate.py` writes what is made here.
"""

import codecs
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from pagedd.client.protocol import Choice, Delta, TokenLogprob, Usage
from pagedd.daemon.text.tokenizer import TextTokenizer

encode = msgspec.json.Encoder().encode
DONE_EVENT = b"data: [DONE]\n\n"

# JSON has no infinity; OpenAI writes this for a token that could not be drawn.
_LOWEST_LOGPROB = -9999.0


class CachedTokens(msgspec.Struct):
    cached_tokens: int


class UsageBody(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatLogprob]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | msgspec.UnsetType | None = msgspec.UNSET


class ChatText(msgspec.Struct):
    content: str | msgspec.UnsetType = msgspec.UNSET
    role: str | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatText
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | None


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatText
    logprobs: ChatLogprobs | None
    finish_reason: str | None


AnyChoice = TypeVar("AnyChoice", CompletionChoice, ChatChoice, ChatChunkChoice)


class Answer(msgspec.Struct, Generic[AnyChoice]):
    """A whole body or a stream chunk. `usage` is absent, null in the chunks before the last, or the usage."""

    id: str
    object: str
    created: int
    model: str
    choices: list[AnyChoice]
    usage: UsageBody | msgspec.UnsetType | None = msgspec.UNSET


class ModelCard(msgspec.Struct):
    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int


class ModelList(msgspec.Struct):
    object: str
    data: list[ModelCard]


class TokenizeAnswer(msgspec.Struct):
    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeAnswer(msgspec.Struct):
    prompt: str


class HealthAnswer(msgspec.Struct):
    """`state` is the engine's, or `stopping`; `detail` says it in words."""

    status: str
    state: str
    detail: str


class StatusAnswer(msgspec.Struct):
    status: str


class LoadAnswer(msgspec.Struct):
    """`model` is the name of the one that is served now."""

    status: str
    model: str


def event(payload: bytes) -> bytes:
    """A server-sent event. JSON has no raw line break, so one `data:` line is enough."""
    return b"data: " + payload + b"\n\n"


@dataclass(slots=True, eq=False)
class AnswerWriter:
    """Makes the answers of one HTTP request, of `num_prompts` prompts with `n` choices each.

    Attributes:
        kind: `completion` or `chat`.
        include_usage: chunks have a `usage`, null but for the last.
    """

    kind: str
    answer_id: str
    created: int
    model: str
    n: int
    include_usage: bool
    tokenizer: TextTokenizer
    _begun: set[int] = field(default_factory=set)
    _texts: dict[int, "_TextPosition"] = field(default_factory=dict)

    @property
    def is_chat(self) -> bool:
        return self.kind == "chat"

    def whole(self, prompts: list[list[Choice]], usage: Usage) -> bytes:
        """The body of a request that was not streamed; `prompts` are each prompt's choices, in order."""
        numbered = [
            (number * self.n + choice.index, choice) for number, group in enumerate(prompts) for choice in group
        ]
        if self.is_chat:
            choices: list[Any] = [
                ChatChoice(
                    index,
                    ChatText(content=choice.text, role="assistant"),
                    self._chat_logprobs(choice.logprobs),
                    choice.finish_reason,
                    choice.stop_reason,
                )
                for index, choice in numbered
            ]
        else:
            choices = [
                CompletionChoice(
                    index,
                    choice.text,
                    self._completion_logprobs(index, choice.logprobs),
                    choice.finish_reason,
                    choice.stop_reason,
                )
                for index, choice in numbered
            ]
        kind = "chat.completion" if self.is_chat else "text_completion"
        return encode(Answer(self.answer_id, kind, self.created, self.model, choices, _usage_body(usage)))

    def chunk(self, prompt_number: int, delta: Delta) -> bytes:
        """The event or events of one delta: a chat's first has the role before it."""
        index = prompt_number * self.n + delta.index
        if not self.is_chat:
            shown = self._completion_logprobs(index, delta.logprobs)
            return self._event([CompletionChoice(index, delta.text, shown, delta.finish_reason)])
        begin = b""
        if index not in self._begun:
            self._begun.add(index)
            begin = self._event([ChatChunkChoice(index, ChatText(content="", role="assistant"), None, None)])
        text = ChatText(content=delta.text) if delta.text or delta.finish_reason is None else ChatText()
        logprobs = self._chat_logprobs(delta.logprobs)
        return begin + self._event([ChatChunkChoice(index, text, logprobs, delta.finish_reason)])

    def usage_chunk(self, usage: Usage) -> bytes:
        """The last chunk of a stream that was asked for its usage: no choices, and the usage."""
        return self._event([], _usage_body(usage))

    def _event(self, choices: list[Any], usage: UsageBody | None = None) -> bytes:
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        shown = usage if self.include_usage else msgspec.UNSET
        return event(encode(Answer(self.answer_id, kind, self.created, self.model, choices, shown)))

    def _chat_logprobs(self, logprobs: list[TokenLogprob] | None) -> ChatLogprobs | None:
        if logprobs is None:
            return None
        return ChatLogprobs(
            [
                ChatLogprob(
                    at.token,
                    _finite(at.logprob),
                    self._bytes(at.token_id),
                    [TopLogprob(token, _finite(logprob), self._bytes(other)) for other, token, logprob in at.top],
                )
                for at in logprobs
            ]
        )

    def _completion_logprobs(self, index: int, logprobs: list[TokenLogprob] | None) -> CompletionLogprobs | None:
        if logprobs is None:
            return None
        position = self._texts.setdefault(index, _TextPosition())
        has_top = any(at.top for at in logprobs)
        return CompletionLogprobs(
            tokens=[at.token for at in logprobs],
            token_logprobs=[_finite(at.logprob) for at in logprobs],
            # The k best, and the chosen one where it is not among them.
            top_logprobs=[
                {token: _finite(logprob) for _, token, logprob in at.top} | {at.token: _finite(at.logprob)}
                for at in logprobs
            ]
            if has_top
            else None,
            text_offset=[position.advance(self.tokenizer.token_bytes(at.token_id)) for at in logprobs],
        )

    def _bytes(self, token_id: int) -> list[int]:
        return list(self.tokenizer.token_bytes(token_id))


class _TextPosition:
    """How many characters of a choice's text there are before a token."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_chars = 0

    def advance(self, token_bytes: bytes) -> int:
        offset = self._num_chars
        self._num_chars += len(self._decoder.decode(token_bytes))
        return offset


def _usage_body(usage: Usage) -> UsageBody:
    return UsageBody(
        usage.prompt_tokens, usage.completion_tokens, usage.total_tokens, CachedTokens(usage.cached_tokens)
    )


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)
