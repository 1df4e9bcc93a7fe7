"""Answers `/v1/completions` and `/v1/chat/completions`: one request in, a whole body or a stream of events out.

Owns the wait for a request's messages and what happens when its client is gone or does not read. What the JSON looks
like is `openai_schema.py`'s and `openai_responses.py`'s.
"""

import asyncio
import logging

from aiohttp import web

from pagedd.client.error_body import error_body
from pagedd.client.errors import PageddError
from pagedd.client.protocol import Accepted, Choice, DaemonMessage, Delta, Done, Failed, Usage, Waking
from pagedd.daemon.caller import Caller
from pagedd.daemon.openai_responses import DONE_EVENT, AnswerWriter, event
from pagedd.daemon.openai_schema import OpenAIRequest
from pagedd.daemon.request_stream import RequestStream
from pagedd.daemon.service import Service
from pagedd.daemon.wall_clock import unix_s

log = logging.getLogger(__name__)

# A connection whose buffer is full and that takes nothing for so long is dropped.
_WRITE_TIMEOUT_S = 60.0


async def generate(
    service: Service, http: web.Request, caller: Caller, request: OpenAIRequest, kind: str
) -> web.StreamResponse:
    """Runs `request` to its end. `kind` is `completion` or `chat`.

    Raises `PageddError` when it is refused before its first token, its field named as the client wrote it. When the
    client goes away aiohttp cancels this, and the request stops.
    """
    run = _Run(service, http, caller, request, kind)
    try:
        return await run.answer()
    finally:
        run.stop()


class _Run:
    """One HTTP request and the live requests of its prompts."""

    def __init__(self, service: Service, http: web.Request, caller: Caller, request: OpenAIRequest, kind: str) -> None:
        self._service = service
        self._http = http
        self._request = request
        self._kind = kind
        self._stream = RequestStream(self._client_too_slow)
        self._done: dict[int, Done] = {}
        self._ids = service.start(request.messages, caller, self._stream.push)

    async def answer(self) -> web.StreamResponse:
        # These alone say nothing to a client, and the engine may still refuse with a status of its own.
        messages: list[DaemonMessage] = []
        while all(isinstance(message, Waking | Accepted) for message in messages):
            messages = await self._stream.take()
        writer = self._writer()
        if self._request.stream:
            return await self._streamed(writer, messages)
        return await self._whole(writer, messages)

    def stop(self) -> None:
        """Ends what still runs: the client is gone, or another prompt of the same request failed."""
        for request_id in self._ids:
            self._service.client_gone(request_id)

    async def _whole(self, writer: AnswerWriter, messages: list[DaemonMessage]) -> web.Response:
        while True:
            for message in messages:
                if isinstance(message, Failed):
                    raise self._refusal(message)
                self._keep(message)
            if self._all_done:
                break
            messages = await self._stream.take()
        prompts: list[list[Choice]] = [self._done[number].choices for number in range(len(self._ids))]
        if self._request.messages[0].sampling.logprobs is None:
            body = writer.whole(prompts, self._usage())
        else:  # tens of MiB, perhaps
            body = await asyncio.to_thread(writer.whole, prompts, self._usage())
        return web.Response(body=body, content_type="application/json")

    async def _streamed(self, writer: AnswerWriter, messages: list[DaemonMessage]) -> web.StreamResponse:
        # A request that fails before its first token has a status; later it can only have an event.
        if failed := next((message for message in messages if isinstance(message, Failed)), None):
            raise self._refusal(failed)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(self._http)
        try:
            await self._write_events(response, writer, messages)
        except ConnectionError:
            raise
        except Exception:
            # The status is out, so that the fault can only be an event.
            log.exception("a stream broke", extra={"request_id": self._ids[0]})
            await self._write(response, event(error_body("internal", "the log has the trace", None)))
        return response

    async def _write_events(
        self, response: web.StreamResponse, writer: AnswerWriter, messages: list[DaemonMessage]
    ) -> None:
        while True:
            payload = b""
            for message in messages:
                if isinstance(message, Delta):
                    payload += writer.chunk(int(message.id), message)
                elif isinstance(message, Failed):
                    error = self._refusal(message)
                    await self._write(response, payload + event(error_body(error.code, error.message, error.field)))
                    return
                self._keep(message)
            if self._all_done:
                break
            if payload:
                await self._write(response, payload)
            messages = await self._stream.take()
        if self._request.include_usage:
            payload += writer.usage_chunk(self._usage())
        await self._write(response, payload + DONE_EVENT)

    async def _write(self, response: web.StreamResponse, payload: bytes) -> None:
        try:
            async with asyncio.timeout(_WRITE_TIMEOUT_S):
                await response.write(payload)
        except TimeoutError:
            self._client_too_slow()

    def _client_too_slow(self) -> None:
        for request_id in self._ids:
            self._service.client_too_slow(request_id, "its messages")
        # The buffer may be full, so the client cannot be told. aiohttp cancels the handler of a connection that ends.
        if self._http.transport is not None:
            self._http.transport.abort()

    def _keep(self, message: DaemonMessage) -> None:
        if isinstance(message, Done):
            self._done[int(message.id)] = message

    @property
    def _all_done(self) -> bool:
        return len(self._done) == len(self._ids)

    def _usage(self) -> Usage:
        usages = [done.usage for done in self._done.values()]
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in usages),
            completion_tokens=sum(usage.completion_tokens for usage in usages),
            cached_tokens=sum(usage.cached_tokens for usage in usages),
        )

    def _writer(self) -> AnswerWriter:
        model = self._service.served_model()
        prefix = "chatcmpl" if self._kind == "chat" else "cmpl"
        return AnswerWriter(
            kind=self._kind,
            answer_id=f"{prefix}-{self._ids[0]}",
            created=int(unix_s()),
            model=model.name,
            n=self._request.messages[0].sampling.n,
            include_usage=self._request.include_usage,
            tokenizer=model.tokenizer,
        )

    def _refusal(self, failed: Failed) -> PageddError:
        name = self._request.renamed.get(failed.field, failed.field) if failed.field is not None else None
        return PageddError(failed.code, failed.message, field=name, retry_after_s=failed.retry_after_s)
