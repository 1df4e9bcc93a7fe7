"""The messages of the ZeroMQ sockets, on both sides."""

from contextlib import suppress

import msgspec

from pagedd.bench.fuzz.target import Target, check_refusal
from pagedd.client import protocol
from pagedd.client.errors import PageddError
from pagedd.client.protocol import Cancel, Chat, ChatMessage, Delta, Done, Failed, Generate, Sampling, Usage
from pagedd.client.questions import GetStats
from pagedd.client.stats_frame import decode_stats
from pagedd.daemon.admission import check_message
from pagedd.daemon.zmq_api import decode_message, id_of


def read(data: bytes) -> None:
    id_of(data)
    try:
        message = decode_message(data)
        assert decode_message(protocol.encode(message)) == message or b"\xff" in data  # NaN is no NaN's equal
        if isinstance(message, Generate | Chat):
            check_message(message, "served")
    except PageddError as error:
        check_refusal(error)
    for decode in (protocol.decode_daemon, decode_stats):
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            decode(data)


TARGET = Target(
    read,
    [
        protocol.encode(message)
        for message in (
            Generate(id="a", prompt="once", sampling=Sampling(temperature=0.5, logit_bias={"1": 2.0}, stop=["\n"])),
            Generate(id="a", prompt_token_ids=[1, 2, 3], priority=-5, cache_salt="salt"),
            Chat(id="a", messages=[ChatMessage(role="user", content="hi", name="me")], stream=False),
            Cancel(id="a", target="b"),
            GetStats(id="a", blocks=True),
            Delta(id="a", text="hi", token_ids=[1]),
            Failed(id="a", code="queue_full", message="x"),
            Done(id="a", request_id="r", model="m", choices=[], usage=Usage(prompt_tokens=1, completion_tokens=2)),
        )
    ],
)
