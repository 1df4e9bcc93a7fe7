"""Every refusal pagedd can give: one stable code, its HTTP status, and what it means.

Owns the table that `docs/errors.md` prints and that both APIs and the client speak. Knows nothing of how a fault is
found. The engine, which may not import this package, raises codes from the same table (a test holds the two together).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """One row of the table: `http_status` and a sentence for people."""

    http_status: int
    meaning: str


ERROR_KINDS: dict[str, ErrorKind] = {
    # The message itself
    "malformed_message": ErrorKind(
        400, "The bytes are not a message of this protocol (JSON over HTTP, msgpack over ZeroMQ)."
    ),
    "protocol_version": ErrorKind(400, "The client speaks another version of the ZeroMQ protocol."),
    "message_too_large": ErrorKind(413, "The body or frame is larger than the daemon accepts."),
    "body_timeout": ErrorKind(408, "The body did not arrive in time."),
    "missing_field": ErrorKind(400, "A required field is absent."),
    "invalid_type": ErrorKind(400, "A field has the wrong JSON type."),
    "invalid_value": ErrorKind(400, "A field has a value outside its documented range."),
    "unsupported_field": ErrorKind(400, "A known field asks for something that pagedd does not do."),
    # The prompt
    "empty_prompt": ErrorKind(400, "The prompt holds no token."),
    "empty_messages": ErrorKind(400, "A chat needs at least one message."),
    "too_many_prompts": ErrorKind(400, "One request carries more prompts or choices than allowed."),
    "token_out_of_vocabulary": ErrorKind(400, "A token id is not in the model's vocabulary."),
    "prompt_too_long": ErrorKind(400, "Prompt and requested output together exceed the model's context."),
    "exceeds_kv_pool": ErrorKind(400, "The request could never fit the KV-cache pool, even alone."),
    "no_chat_template": ErrorKind(400, "The model has no chat template."),
    "template_error": ErrorKind(400, "The chat template refused the messages, or did not finish."),
    "poison_request": ErrorKind(422, "Engines died while this very request ran; it is not tried again for a while."),
    # Who and what
    "model_not_found": ErrorKind(404, "No model of that name is served."),
    "request_not_found": ErrorKind(404, "No live request has that id."),
    "prefix_not_found": ErrorKind(404, "No cached prefix has that digest."),
    "duplicate_request": ErrorKind(409, "A live request of this client has that id already."),
    "unknown_route": ErrorKind(404, "No such path."),
    "method_not_allowed": ErrorKind(405, "That path takes another method."),
    "unauthorized": ErrorKind(401, "The API key is absent or wrong."),
    "forbidden": ErrorKind(403, "This caller may not do that."),
    # The daemon's state
    "too_many_bodies": ErrorKind(
        503,
        "This caller, or all, send so much at once that a large body has no room.",
    ),
    "queue_full": ErrorKind(429, "Too many requests wait already; try again later."),
    "over_quota": ErrorKind(429, "The caller has used up its quota for now; it is told when to try again."),
    "exceeds_quota": ErrorKind(400, "The request could never fit its caller's quota, even alone."),
    "client_too_slow": ErrorKind(429, "The client did not read its tokens, so the request was ended."),
    "engine_loading": ErrorKind(503, "The model is still loading."),
    "engine_died": ErrorKind(503, "The engine process ended; it is being restarted."),
    "engine_asleep": ErrorKind(503, "The engine was put to sleep while the request ran; the next request wakes it."),
    "device_yielded": ErrorKind(503, "Another program needs the device; the engine comes back when it does no more."),
    "engine_stalled": ErrorKind(503, "A step of the engine takes very long; if it does not end, another is started."),
    "engine_failed": ErrorKind(503, "The engine could not be started; see the log."),
    "shutting_down": ErrorKind(503, "The daemon is stopping."),
    "daemon_unreachable": ErrorKind(503, "No daemon answers at that socket."),
    # Faults
    "out_of_memory": ErrorKind(500, "The device ran out of memory, for this request or while the model loaded."),
    "nan_logits": ErrorKind(500, "The model produced numbers that are not finite for this request."),
    "internal": ErrorKind(500, "A fault inside pagedd; the log has the trace under the request's id."),
    # Configuration (start-up and command line)
    "unknown_setting": ErrorKind(400, "A flag, environment variable or TOML key that does not exist."),
    "invalid_setting": ErrorKind(400, "A setting has a value outside its documented range."),
    "already_running": ErrorKind(409, "Another daemon serves that runtime directory."),
    "model_unavailable": ErrorKind(404, "The model is not on disk and could not be fetched."),
    "model_in_use": ErrorKind(409, "A daemon serves the model that was to be removed."),
    "checksum_mismatch": ErrorKind(500, "A fetched file is not the one that was asked for."),
    "unsupported_model": ErrorKind(400, "The model needs something that pagedd does not implement exactly."),
    "device_unavailable": ErrorKind(503, "The device does not compute now: no driver, or the card is lost."),
    "unsupported_device": ErrorKind(
        400,
        "The device can never serve here: the GPU is too old for the kernels or too small for the model, or torch is "
        "built without CUDA.",
    ),
    "poor_kv_quality": ErrorKind(
        500, "The quantized KV cache changes more of this model's answers than it should, and was to be refused then."
    ),
    "no_kv_memory": ErrorKind(500, "Not enough free memory for even one block of KV cache."),
    "no_host_memory": ErrorKind(500, "The host cannot give the KV cache as much memory as kv_host_gib asks for."),
}


class PageddError(Exception):
    """A refusal or fault: a code of `ERROR_KINDS`, a message (value, limit, next step), maybe the field it names.

    Attributes:
        retry_after_s: when the same may be asked again with success; None where that is not known.
    """

    def __init__(
        self, code: str, message: str, *, field: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s

    @property
    def http_status(self) -> int:
        return ERROR_KINDS[self.code].http_status if self.code in ERROR_KINDS else 500
