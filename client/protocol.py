"""The messages of the ZeroMQ sockets: what a client may say, and what it hears back.

A client's DEALER sends two frames, `[PROTOCOL_VERSION, msgpack(ClientMessage)]`; the daemon answers in the same form
with a `DaemonMessage`. Every accepted `Generate` or `Chat` gets any number of `Delta` and exactly one
terminal message: `Done` or `Failed`. `id` is chosen by the client and is unique among its live requests.

Owns names, types and defaults of requests and orders; questions about the daemon are `questions.py`'s, a picture of it
`stats_frame.py`'s. Ranges are checked by the daemon (`daemon/limits.py`), the same for HTTP.
"""

from typing import Any

import msgspec

from pagedd.client.questions import Answer, Question
from pagedd.client.stats_frame import StatsFrame

PROTOCOL_VERSION = b"pagedd1"
MAX_MESSAGE_BYTES = 8 << 20


class Sampling(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How to choose tokens. The names are those of OpenAI's API and of vLLM's extensions to it.

    Attributes:
        max_tokens: most tokens to produce; None is 16 for `Generate`, and what is left of the context for `Chat`.
        min_tokens: end-of-sequence and stop ids are withheld until this many tokens are out.
        temperature: 0 is greedy (ties go to the lowest id).
        top_k: 0 or -1 keeps all.
        seed: the same seed draws the same tokens from the same logits; None draws one.
        logprobs: 0 gives the chosen token's log-probability, k > 0 the k best as well (natural log, of the raw logits).
        stop: strings that end the text; they are not part of it.
        ignore_eos: go on after the model's end-of-sequence.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] | None = None
    logprobs: int | None = None
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False


class ChatMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    role: str
    content: str
    name: str | None = None


class Generate(msgspec.Struct, tag="generate", kw_only=True, omit_defaults=True):
    """Continue a prompt, given as text or as token ids (exactly one of the two).

    Attributes:
        parse_special: read `<|…|>`-like text in the prompt as control tokens. Off, so that pasted text is no command.
        cache_salt: narrows prefix sharing to requests with the same salt (and the same caller).
        stream: False sends no `Delta`; everything comes with `Done`.
        traceparent, tracestate: of the caller's span, as in W3C's headers of these names; what is malformed is ignored.
    """

    id: str
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    sampling: Sampling = msgspec.field(default_factory=Sampling)
    model: str = "default"
    priority: int = 0
    stream: bool = True
    parse_special: bool = False
    cache_salt: str | None = None
    traceparent: str | None = None
    tracestate: str | None = None


class Chat(msgspec.Struct, tag="chat", kw_only=True, omit_defaults=True):
    """Answer a conversation through the model's chat template."""

    id: str
    messages: list[ChatMessage]
    sampling: Sampling = msgspec.field(default_factory=Sampling)
    model: str = "default"
    priority: int = 0
    stream: bool = True
    cache_salt: str | None = None
    traceparent: str | None = None
    tracestate: str | None = None


class Cancel(msgspec.Struct, tag="cancel", kw_only=True):
    """End a request. `target` is the client's own `id`; on the admin socket, any daemon-given `request_id`."""

    id: str
    target: str


class SetPriority(msgspec.Struct, tag="set_priority", kw_only=True):
    """Admin socket only: change a live request's priority (−100 … 100, higher is more urgent)."""

    id: str
    target: str
    priority: int


class Sleep(msgspec.Struct, tag="sleep", kw_only=True):
    """Admin socket only: end the engine process once its requests have ended; `Ok` when it is gone."""

    id: str


class Wake(msgspec.Struct, tag="wake", kw_only=True):
    """Admin socket only: start the engine process again, as the next request would; `Ok` at once."""

    id: str


class Load(msgspec.Struct, tag="load", kw_only=True, omit_defaults=True):
    """Admin socket only: serve `model` in place of the one that is served; `Ok` when it is, `Failed` when it is not.

    Attributes:
        model: as the setting of that name: a known name, a Hugging Face name, or a path as the daemon sees it.
        served_name: under which clients ask for it; None is the model's own.
    """

    id: str
    model: str
    served_name: str | None = None


class Ping(msgspec.Struct, tag="ping", kw_only=True):
    id: str


ClientMessage = Generate | Chat | Cancel | SetPriority | Sleep | Wake | Load | Question | Ping


class TokenLogprob(msgspec.Struct, kw_only=True):
    """One position's log-probabilities, natural log of the model's raw distribution. `top` is best first."""

    token_id: int
    token: str
    logprob: float
    top: list[tuple[int, str, float]] = []


class Delta(msgspec.Struct, tag="delta", kw_only=True, omit_defaults=True):
    """New text of one choice, possibly empty. `token_ids` are those that it came from since the last delta."""

    id: str
    index: int = 0
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class Choice(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One finished answer. `finish_reason` is `stop`, `length` or `abort`; `stop_reason` the string or id."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprob] | None = None


class Done(msgspec.Struct, tag="done", kw_only=True, omit_defaults=True):
    """The terminal message of a request that was served. `choices` holds whole texts, streamed or not, and
    log-probabilities where they were not streamed.
    """

    id: str
    request_id: str
    model: str
    choices: list[Choice]
    usage: Usage


class Failed(msgspec.Struct, tag="failed", kw_only=True, omit_defaults=True):
    """The terminal message of a request that was refused or broke; `code` is a key of `errors.ERROR_KINDS`.

    `retry_after_s` is when the same may be asked again with success, where that is known.
    """

    id: str
    code: str
    message: str
    field: str | None = None
    request_id: str | None = None
    retry_after_s: float | None = None


class Accepted(msgspec.Struct, tag="accepted", kw_only=True):
    """A `Generate` or `Chat` entered the queue under the daemon's own `request_id`."""

    id: str
    request_id: str


class Waking(msgspec.Struct, tag="waking", kw_only=True):
    """A `Generate` or `Chat` waits for an engine that slept or is being replaced; `Accepted` or `Failed` follows."""

    id: str
    request_id: str


class Ok(msgspec.Struct, tag="ok", kw_only=True):
    """`Cancel` or `SetPriority` was done."""

    id: str


class Pong(msgspec.Struct, tag="pong", kw_only=True):
    """Answer to `Ping`."""

    id: str
    version: str = ""
    state: str = ""


DaemonMessage = Waking | Accepted | Delta | Done | Failed | Ok | Pong | Answer


_encoder = msgspec.msgpack.Encoder()
_client_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ClientMessage)
_daemon_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(DaemonMessage)


def encode(message: ClientMessage | DaemonMessage | StatsFrame) -> bytes:
    """Message to msgpack bytes, the second frame on the wire (the only one on the stats socket)."""
    return _encoder.encode(message)


def decode_client(payload: bytes) -> ClientMessage:
    """Bytes from a client. Raises `msgspec.DecodeError` (not msgpack) or `msgspec.ValidationError` (wrong shape)."""
    message: ClientMessage = _client_decoder.decode(payload)
    return message


def decode_daemon(payload: bytes) -> DaemonMessage:
    """Bytes from the daemon. Raises like `decode_client`."""
    message: DaemonMessage = _daemon_decoder.decode(payload)
    return message
