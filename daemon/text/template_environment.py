"""The Jinja environment that chat templates are written for, as transformers defines it.

Owns what a template may call. Not how long it may run: `template_worker.py` bounds that, and `chat_template.py` decides
where a template runs.
"""

import json
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pagedd.daemon.wall_clock import local_now

MAX_OUTPUT_CHARACTERS = 16 << 20


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks what a model wrote, for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012  # the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def compile_template(source: str) -> jinja2.Template:
    """Raises `jinja2.TemplateSyntaxError`, and whatever constant expressions in it raise: they are computed now."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def render_bounded(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """The text. Raises `jinja2.TemplateError`, also past `MAX_OUTPUT_CHARACTERS`, and whatever an expression raises."""
    pieces = []
    room = MAX_OUTPUT_CHARACTERS
    for piece in template.generate(variables):
        room -= len(piece)
        if room < 0:
            raise jinja2.TemplateError(f"the chat template's text is longer than {MAX_OUTPUT_CHARACTERS} characters")
        pieces.append(piece)
    return "".join(pieces)


def describe(error: Exception) -> str:
    """The template's own message for `raise_exception`, else what went wrong in it."""
    if type(error) is jinja2.TemplateError:
        return error.message or "the chat template refused the messages without a message"
    return f"the chat template failed ({type(error).__name__}: {error})"


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter of this name escapes HTML, which no model has seen."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(format: str) -> str:
    return local_now().strftime(format)
