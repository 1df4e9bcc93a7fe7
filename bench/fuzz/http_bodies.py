"""The JSON bodies of the HTTP API, up to the checks that need no model."""

from functools import partial

from pagedd.bench.fuzz.target import Target, check_refusal
from pagedd.client.error_body import error_body
from pagedd.client.errors import PageddError
from pagedd.daemon.admission import check_message, check_num_choices
from pagedd.daemon.ignored_fields import IgnoredFields
from pagedd.daemon.openai_schema import (
    ChatBody,
    chat_request,
    completion_request,
    detokenize_request,
    tokenize_request,
)

_MAX_PROMPTS = 128


def read(data: bytes) -> None:
    for parse in (partial(completion_request, max_prompts=_MAX_PROMPTS), chat_request):
        try:
            messages = parse(data).messages
            for message in messages:
                check_message(message, "served")
            check_num_choices(messages, _MAX_PROMPTS)
            IgnoredFields().note(data, ChatBody.__struct_fields__, "uid:0")
        except PageddError as error:
            _refuse(error)
    try:
        check_message(tokenize_request(data), "served")
    except PageddError as error:
        _refuse(error)
    try:
        detokenize_request(data)
    except PageddError as error:
        _refuse(error)


def _refuse(error: PageddError) -> None:
    check_refusal(error)
    error_body(error.code, error.message, error.field)


TARGET = Target(
    read,
    [
        b'{"prompt": "once", "max_tokens": 5, "temperature": 0.5, "stop": ["\\n"], "logit_bias": {"1": 2}}',
        b'{"prompt": [[1, 2], [3]], "n": 2, "stream": true, "stream_options": {"include_usage": true}}',
        b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "logprobs": true}',
        b'{"prompt": "a", "seed": 18446744073709551616, "echo": 0, "response_format": {"type": "text"}, "x": [[]]}',
        b'{"tokens": [1, 2, 3]}',
    ],
)
