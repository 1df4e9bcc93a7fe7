"""The HTTP API's OpenAPI document, made of what serves it: the routes, the bodies' decoders, the limits of admission.

Owns the form of the document. A field that the decoders learn, or a limit that changes, is in it without a change here.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import msgspec

from pagedd.client.error_body import ErrorBody
from pagedd.daemon.http_routes import ROUTES, Route
from pagedd.daemon.limits import LIMITS, Limit
from pagedd.daemon.openai_schema import NEUTRAL_VALUES

Json = dict[str, Any]

_REF = "#/components/schemas/{name}"
# Fields with the limit of another one.
_LIMIT_OF = {"max_completion_tokens": "max_tokens", "top_logprobs": "logprobs"}


def openapi_document(routes: Sequence[Route] = ROUTES) -> Json:
    """OpenAPI 3.1, ready to be encoded."""
    types = [kind for route in routes for kind in (route.body, route.answer) if kind is not None]
    named, components = msgspec.json.schema_components([ErrorBody, *types], ref_template=_REF)
    references = dict(zip([ErrorBody, *types], named, strict=True))
    for name, component in components.items():
        _add_limits(name, component)
    paths: dict[str, Json] = {}
    for route in routes:
        # aiohttp's `{name:.+}` is `{name}` here.
        path = re.sub(r"\{(\w+):[^}]*\}", r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, path, references)
    return {
        "openapi": "3.1.0",
        "info": {"title": "pagedd", "version": version("pagedd"), "description": "OpenAI's API, served from one box."},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "Over TCP; the Unix socket needs none."}
            },
        },
    }


def _operation(route: Route, path: str, references: Mapping[Any, Json]) -> Json:
    if route.answer is not None:
        content: Json = {"application/json": {"schema": references[route.answer]}}
    else:
        content = {"text/plain": {"schema": {"type": "string"}}}
    if "stream" in getattr(route.body, "__struct_fields__", ()):
        content["text/event-stream"] = {"schema": {"description": "With stream: an answer in each event, then [DONE]."}}
    refusal = {"application/json": {"schema": references[ErrorBody]}}
    operation: Json = {
        "operationId": route.handler,
        "summary": route.meaning,
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in re.findall(r"\{(\w+)\}", path)
        ],
        "responses": {
            "200": {"description": "The answer.", "content": content},
            "4XX": {"description": "Refused; `error.code` says why.", "content": refusal},
            "5XX": {"description": "A fault, or not now; `error.code` says which.", "content": refusal},
        },
        "security": [] if route.is_open else [{"key": []}],
    }
    if route.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": references[route.body]}},
        }
    return operation


def _add_limits(name: str, component: Json) -> None:
    """To the fields of one body, what `limits.py` and `openai_schema.py` say of them."""
    prefix = "messages." if name == "Turn" else ""
    for field, schema in component.get("properties", {}).items():
        limit = LIMITS.get(prefix + _LIMIT_OF.get(field, field))
        if limit is not None and name.endswith(("Body", "Turn")):
            schema["description"] = limit.meaning
            for branch in _branches(schema):
                _narrow(branch, limit)
        elif field in NEUTRAL_VALUES:
            schema["description"] = "Known, and refused unless it asks for nothing."
            schema["enum"] = [None, *NEUTRAL_VALUES[field]]


def _branches(schema: Json) -> Iterator[Json]:
    yield from schema.get("anyOf", [schema])


def _narrow(schema: Json, limit: Limit) -> None:
    match schema.get("type"):
        case "integer" | "number":
            if limit.low is not None:
                schema["exclusiveMinimum" if limit.low_is_open else "minimum"] = limit.low
            if limit.high is not None:
                schema["maximum"] = limit.high
        case "string":
            schema["minLength"] = 1
            if limit.max_chars is not None:
                schema["maxLength"] = limit.max_chars
        case "array":
            if limit.min_items:
                schema["minItems"] = limit.min_items
            if limit.max_items is not None:
                schema["maxItems"] = limit.max_items
            _narrow(schema.get("items", {}), limit)
        case "object":
            if limit.max_items is not None:
                schema["maxProperties"] = limit.max_items
            _narrow(schema.get("additionalProperties", {}), limit)
