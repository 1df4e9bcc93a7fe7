"""A trace for each request that got in, for OpenTelemetry: its wait, the computing of its prompt, its answer.

Owns names and attributes, by the semantic conventions for generative AI
(https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/); no text is among them. A request's span is a child
of its caller's, where that says which it is. Spans are made when a request has ended, of the times that the metrics
have, and leave in a thread of the package's. Needs `pagedd[otel]`.
"""

import logging
import time
from typing import TYPE_CHECKING, Any

from pagedd.client.errors import PageddError
from pagedd.client.protocol import Chat, Generate
from pagedd.daemon.live_requests import LiveEntry
from pagedd.daemon.wall_clock import unix_s

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import SpanProcessor

# A collector that is away costs its spans, and at the daemon's end this long.
_EXPORT_TIMEOUT_S = 2
# What W3C has every implementation take at least of either header.
_MAX_HEADER_CHARS = 512
# They warn of what callers send, which is no business of the log.
_TALKATIVE = ("opentelemetry.trace.propagation.tracecontext", "opentelemetry.trace.span")


class Tracing:
    """Spans of the requests of one daemon. Raises `PageddError("invalid_setting")` where the package is not there."""

    def __init__(self, endpoint: str, processor: "SpanProcessor | None" = None) -> None:
        """`endpoint` is a collector's URL for OTLP over HTTP; `processor` gets the spans instead of it."""
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider

            if processor is None:
                processor = _to_collector(endpoint)
        except ImportError as error:
            why = f"{error.name} is not installed; install pagedd[otel]"
            raise PageddError("invalid_setting", f"otel_endpoint = {endpoint}: {why}", field="otel_endpoint") from None
        self._provider = TracerProvider(resource=Resource.create({"service.name": "pagedd"}), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("pagedd")
        for name in _TALKATIVE:
            logging.getLogger(name).setLevel(logging.ERROR)

    def caller_context(self, message: Generate | Chat) -> "Context":
        """Of the span that the caller says it is in; an empty one where it says nothing, or what is not well-formed.

        A caller that does not sample its trace gets no span here either (https://www.w3.org/TR/trace-context/).
        """
        from opentelemetry.context import Context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        given = {"traceparent": message.traceparent, "tracestate": message.tracestate}
        carrier = {name: value for name, value in given.items() if value and len(value) <= _MAX_HEADER_CHARS}
        return TraceContextTextMapPropagator().extract(carrier, Context())

    def ended(self, entry: LiveEntry) -> None:
        """The trace of a request that has just ended."""
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

        request, times = entry.request, entry.times
        now_s = time.monotonic()
        to_unix_s = unix_s(now_s) - now_s  # read once, so that a clock that is set meanwhile tears no trace

        def unix_ns(monotonic_s: float) -> int:
            return int((monotonic_s + to_unix_s) * 1e9)

        operation = "chat" if isinstance(entry.message, Chat) else "text_completion"
        root = self._tracer.start_span(
            f"{operation} {request.model}",
            context=entry.trace_context,
            kind=SpanKind.SERVER,
            start_time=unix_ns(times.arrival_s),
            attributes=_attributes(entry, operation),
        )
        if entry.failure is not None:
            root.set_attribute("error.type", entry.failure)
            root.set_status(StatusCode.ERROR)
        context = set_span_in_context(root, entry.trace_context)
        # What has not begun has no span; what has begun ends with the request.
        begins = [("queue", times.arrival_s)]
        if times.queue_s is not None:
            begins.append(("prefill", times.arrival_s + times.queue_s))
        if times.first_token_s is not None:
            begins.append(("decode", times.first_token_s))
        ends = [*(begin_s for _, begin_s in begins[1:]), now_s]
        for (name, begin_s), end_s in zip(begins, ends, strict=True):
            span = self._tracer.start_span(name, context=context, start_time=unix_ns(begin_s))
            span.end(end_time=unix_ns(max(begin_s, end_s)))
        root.end(end_time=unix_ns(now_s))

    def close(self) -> None:
        """Sends what there is; may take as long as the collector lets it."""
        self._provider.shutdown()


def _to_collector(endpoint: str) -> "SpanProcessor":
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S))


def _attributes(entry: LiveEntry, operation: str) -> dict[str, Any]:
    request, sampling = entry.request, entry.message.sampling
    attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "pagedd",
        "gen_ai.request.model": request.model,
        "gen_ai.response.model": request.model,
        "gen_ai.response.id": request.request_id,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.choice.count": request.num_choices if request.num_choices > 1 else None,
        "gen_ai.usage.input_tokens": request.num_prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": request.num_cached_tokens,
        "gen_ai.usage.output_tokens": request.num_output_tokens,
        "gen_ai.response.finish_reasons": request.finish_reasons(),
    }
    return {name: value for name, value in attributes.items() if value is not None}
