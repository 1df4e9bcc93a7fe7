"""What goes from the front to a replica: one HTTP request, and the text by which it is routed.

Owns which routes there are beyond one machine, and what of a prompt its cached prefix follows from. The daemon judges
the body; here nothing is refused that it would take.
"""

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self

# A replica's daemon takes its own user for an administrator, so what administrators do is not relayed.
ROUTES = frozenset(
    {
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/v1/models"),
        ("GET", "/health"),
        ("GET", "/ready"),
    }
)

# About 5000 tokens tell prompts apart; the router keeps the text of many.
MAX_PROMPT_CHARS = 20_000
_SURROGATES = range(0xD800, 0xE000)


@dataclass(frozen=True)
class Ask:
    """`prompt` is what Ray's prefix router compares, empty when any replica will do."""

    method: str
    path: str
    body: bytes = b""
    prompt: str = ""

    @classmethod
    def of(cls, method: str, path: str, body: bytes = b"") -> Self:
        """The request with the text to route it by."""
        return cls(method, path, body, _prompt(body)[:MAX_PROMPT_CHARS])

    @property
    def is_relayed(self) -> bool:
        return (self.method, self.path) in ROUTES


@dataclass(frozen=True)
class Head:
    """The beginning of an answer; its bytes follow. `replica` says which daemon gives it."""

    status: int
    content_type: str
    retry_after: str | None
    replica: str

    @property
    def headers(self) -> dict[str, str]:
        headers = {"Content-Type": self.content_type, "X-Pagedd-Replica": self.replica}
        return headers if self.retry_after is None else headers | {"Retry-After": self.retry_after}


def _prompt(body: bytes) -> str:
    """Equal beginnings here are equal beginnings of what the engine computes, in the order in which it does."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):  # the daemon says what is wrong with it
        return ""
    if not isinstance(fields, dict):
        return ""
    # Whoever sends a salt shares no prefix with others.
    salt = fields.get("cache_salt")
    parts = [salt] if isinstance(salt, str) else []
    if isinstance(messages := fields.get("messages"), list):
        parts += _of_messages(messages)
    else:
        parts += _of_prompt(fields.get("prompt"))
    return "\n".join(parts)


def _of_messages(messages: list[Any]) -> Iterator[str]:
    for message in messages:
        if isinstance(message, dict):
            yield str(message.get("role"))
            content = message.get("content")
            yield from [content] if isinstance(content, str) else _texts(content)


def _texts(content: object) -> Iterator[str]:
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            yield part["text"]


def _of_prompt(prompt: object) -> Iterable[str]:
    """A text, token ids, or a list of either, of which the first decides."""
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return [prompt]
    ids = prompt if isinstance(prompt, list) else []
    return ["".join(_character(token_id) for token_id in ids if isinstance(token_id, int))]


def _character(token_id: int) -> str:
    """One for each id, so that ids weigh as characters do; past the surrogates, which no UTF-8 can carry."""
    code = token_id if token_id < _SURROGATES.start else token_id + len(_SURROGATES)
    return chr(code) if 0 <= code <= sys.maxunicode else ""
