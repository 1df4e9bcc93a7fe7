"""What each route of the HTTP API does, for a caller who may.

Owns the way from a request to the service and back. Generation is `http_generate.py`'s; the JSON is
`openai_schema.py`'s and `openai_responses.py`'s; who calls, and what becomes of errors, `http_api.py`'s.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from aiohttp import web

from pagedd.client.errors import PageddError
from pagedd.daemon.caller import Caller
from pagedd.daemon.http_body import BodyReader
from pagedd.daemon.http_generate import generate
from pagedd.daemon.ignored_fields import IgnoredFields
from pagedd.daemon.metrics import CONTENT_TYPE
from pagedd.daemon.openai_responses import (
    DetokenizeAnswer,
    HealthAnswer,
    LoadAnswer,
    ModelCard,
    ModelList,
    StatusAnswer,
    TokenizeAnswer,
    encode,
)
from pagedd.daemon.openai_schema import (
    ChatBody,
    CommonBody,
    CompletionBody,
    DetokenizeBody,
    OpenAIRequest,
    TokenizeBody,
    chat_request,
    completion_request,
    detokenize_request,
    load_request,
    tokenize_request,
)
from pagedd.daemon.openapi import openapi_document
from pagedd.daemon.service import Service

CALLER = web.RequestKey("caller", Caller)


class Handlers:
    """One method a route."""

    def __init__(self, service: Service, bodies: BodyReader) -> None:
        self._service = service
        self._bodies = bodies
        self._ignored = IgnoredFields()

    async def completions(self, request: web.Request) -> web.StreamResponse:
        parse = partial(completion_request, max_prompts=self._service.max_prompts_per_request)
        return await self._generate(request, parse, "completion", CompletionBody)

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, chat_request, "chat", ChatBody)

    async def models(self, request: web.Request) -> web.Response:
        return _json(ModelList("list", [self._card()] if self._service.model is not None else []))

    async def model(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        card = self._card()
        if name not in (card.id, "default"):
            raise PageddError("model_not_found", f"model {name[:256]!r} is not served; ask for {card.id!r}")
        return _json(card)

    async def tokenize(self, request: web.Request) -> web.Response:
        async with self._bodies.read(request, request[CALLER]) as body:
            message = tokenize_request(body)
            self._ignored.note(body, TokenizeBody.__struct_fields__, request[CALLER].tag)
        token_ids = await self._service.text.tokenize(message, request[CALLER])
        return _json(TokenizeAnswer(token_ids, len(token_ids), self._service.max_request_tokens))

    async def detokenize(self, request: web.Request) -> web.Response:
        async with self._bodies.read(request, request[CALLER]) as body:
            token_ids = detokenize_request(body)
            self._ignored.note(body, DetokenizeBody.__struct_fields__, request[CALLER].tag)
        text = await self._service.text.detokenize(token_ids, request[CALLER])
        return _json(DetokenizeAnswer(text))

    async def health(self, request: web.Request) -> web.Response:
        """200 as long as the front answers, whatever the engine does: loading is no reason to restart a daemon."""
        return _json(HealthAnswer("live", self._service.state, self._service.describe()))

    async def ready(self, request: web.Request) -> web.Response:
        """200 when a request sent now would be taken."""
        self._service.check_open()
        return _json(StatusAnswer("ready"))

    async def metrics(self, request: web.Request) -> web.Response:
        metrics = self._service.metrics
        machine = await asyncio.to_thread(metrics.render_machine)
        return web.Response(body=metrics.render() + machine, headers={"Content-Type": CONTENT_TYPE})

    async def openapi(self, request: web.Request) -> web.Response:
        return _json(openapi_document())

    async def sleep(self, request: web.Request) -> web.Response:
        _check_admin(request)
        await self._service.device.sleep(request[CALLER])
        return _json(StatusAnswer("sleeping"))

    async def load(self, request: web.Request) -> web.Response:
        _check_admin(request)
        async with self._bodies.read(request, request[CALLER]) as body:
            wanted = load_request(body)
        await self._service.device.load_model(wanted.model, wanted.served_name, request[CALLER])
        return _json(LoadAnswer("serving", self._service.served_model().name))

    async def wake_up(self, request: web.Request) -> web.Response:
        _check_admin(request)
        self._service.device.wake(request[CALLER])
        return _json(StatusAnswer("waking"))

    async def _generate(
        self,
        request: web.Request,
        parse: Callable[[bytes | bytearray], OpenAIRequest],
        kind: str,
        schema: type[CommonBody],
    ) -> web.StreamResponse:
        async with self._bodies.read(request, request[CALLER]) as body:
            try:
                asked = parse(body)
            except PageddError as error:
                self._service.note_failure(error)
                raise
            self._ignored.note(body, schema.__struct_fields__, request[CALLER].tag)
        for message in asked.messages:
            message.traceparent, message.tracestate = _trace_headers(request)
        return await generate(self._service, request, request[CALLER], asked, kind)

    def _card(self) -> ModelCard:
        return ModelCard(
            id=self._service.served_model().name,
            object="model",
            created=self._service.started_unix_s,
            owned_by="pagedd",
            max_model_len=self._service.max_request_tokens,
        )


def _trace_headers(request: web.Request) -> tuple[str | None, str | None]:
    """W3C's two: the first, of which there may be but one, and the lines of the second in one."""
    parents, states = (request.headers.getall(name, []) for name in ("traceparent", "tracestate"))
    return parents[0] if len(parents) == 1 else None, ",".join(states) or None


def _check_admin(request: web.Request) -> None:
    caller = request[CALLER]
    if not caller.is_admin:
        raise PageddError("forbidden", f"{caller.name} is neither root nor the daemon's own user nor an admin key")


def _json(content: Any) -> web.Response:
    return web.Response(body=encode(content), content_type="application/json")
