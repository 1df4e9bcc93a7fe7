"""The paths of the HTTP API: what each takes, what it answers, and what it is for.

Owns the table that `http_handlers.py` serves, `openapi.py` describes to programs and `docs/api.md` to people.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from pagedd.daemon.openai_responses import (
    Answer,
    ChatChoice,
    CompletionChoice,
    DetokenizeAnswer,
    HealthAnswer,
    LoadAnswer,
    ModelCard,
    ModelList,
    StatusAnswer,
    TokenizeAnswer,
)
from pagedd.daemon.openai_schema import ChatBody, CompletionBody, DetokenizeBody, LoadBody, TokenizeBody


@dataclass(frozen=True, slots=True)
class Route:
    """`handler` is the method of `http_handlers.py` that answers.

    Attributes:
        body: what is sent, if anything.
        answer: the JSON that comes back; None for text.
        is_open: no key is needed, because it tells nothing about anyone's requests, and monitors have none.
    """

    method: str
    path: str
    handler: str
    meaning: str
    body: type[msgspec.Struct] | None = None
    answer: Any = None
    is_open: bool = False


ROUTES = (
    Route(
        "POST",
        "/v1/completions",
        "completions",
        "Continue one or several prompts; whole or streamed.",
        body=CompletionBody,
        answer=Answer[CompletionChoice],
    ),
    Route(
        "POST",
        "/v1/chat/completions",
        "chat_completions",
        "Answer a conversation; whole or streamed.",
        body=ChatBody,
        answer=Answer[ChatChoice],
    ),
    Route(
        "GET",
        "/v1/models",
        "models",
        "The served model, in a list; the list is empty while it is fetched.",
        answer=ModelList,
    ),
    Route("GET", "/v1/models/{name:.+}", "model", "The served model by its name, or by `default`.", answer=ModelCard),
    Route(
        "POST",
        "/tokenize",
        "tokenize",
        "Token ids of a `prompt`, or of `messages` through the chat template.",
        body=TokenizeBody,
        answer=TokenizeAnswer,
    ),
    Route(
        "POST",
        "/detokenize",
        "detokenize",
        "Text of `tokens`, control tokens spelled out.",
        body=DetokenizeBody,
        answer=DetokenizeAnswer,
    ),
    Route(
        "GET",
        "/health",
        "health",
        "200 as long as the daemon lives, with the engine's state; needs no key.",
        answer=HealthAnswer,
        is_open=True,
    ),
    Route(
        "GET",
        "/ready",
        "ready",
        "200 when a request would be taken, else 503 with the reason; needs no key.",
        answer=StatusAnswer,
        is_open=True,
    ),
    Route("GET", "/metrics", "metrics", "Figures for Prometheus."),
    Route("GET", "/openapi.json", "openapi", "This API for programs, as an OpenAPI document.", answer=dict[str, Any]),
    Route(
        "POST",
        "/sleep",
        "sleep",
        "Administrators: end the engine process, when its requests have ended.",
        answer=StatusAnswer,
    ),
    Route(
        "POST",
        "/load",
        "load",
        "Administrators: serve the `model` of the body in place of the one that is served.",
        body=LoadBody,
        answer=LoadAnswer,
    ),
    Route(
        "POST",
        "/wake_up",
        "wake_up",
        "Administrators: start the engine process again, as the next request would.",
        answer=StatusAnswer,
    ),
)
