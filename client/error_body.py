"""An error as OpenAI's HTTP API says it, which is how a daemon and whoever relays for it say it.

Owns the object's form. Codes and their statuses are `errors.py`'s.
"""

import msgspec

from pagedd.client.errors import ERROR_KINDS

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct):
    error: ErrorDetail


def error_body(code: str, message: str, param: str | None) -> bytes:
    """OpenAI's error object; `code` is a key of `ERROR_KINDS`."""
    status = ERROR_KINDS[code].http_status if code in ERROR_KINDS else 500
    kind = _ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return msgspec.json.encode(ErrorBody(ErrorDetail(message, kind, param, code)))
