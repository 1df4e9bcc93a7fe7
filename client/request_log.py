"""A log of requests, one JSON object a line: what the daemon writes (`request_log`), `pagectl replay` and tune read.

Owns the form of a line. Token counts and ids only, never a text.
"""

from pathlib import Path

import msgspec

from pagedd.client.errors import PageddError


class LoggedRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One request. Only what has to be said is written: `{"prompt_tokens": 512, "output_tokens": 64}` will do.

    Attributes:
        time_s: when it came, Unix time; in a log made by hand any other beginning, or 0 for all.
        output_tokens: of each choice.
        prompt_tokens: without `prompt_token_ids`, how many.
        system_tokens: without ids, how many at the beginning all such requests have in common.
        n: choices.
        priority: as its client asked.
    """

    output_tokens: int
    prompt_token_ids: list[int] | None = None
    prompt_tokens: int = 0
    system_tokens: int = 0
    time_s: float = 0.0
    n: int = 1
    priority: int = 0


_decoder = msgspec.json.Decoder(LoggedRequest)


def read_log(path: Path) -> list[LoggedRequest]:
    """In the order of the file. Raises `PageddError("invalid_setting")` with the line that is wrong."""
    entries = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise PageddError("invalid_setting", f"load = {path}: {error.strerror}", field="load") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = _decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise PageddError("invalid_setting", f"{path}, line {number}: {error}", field="load") from None
        has_prompt = bool(entry.prompt_token_ids) or entry.prompt_tokens > 0
        if entry.output_tokens < 1 or entry.n < 1 or entry.system_tokens < 0 or not has_prompt:
            rule = "output_tokens and the prompt's ids or length, and n, must be at least 1, system_tokens at least 0"
            raise PageddError("invalid_setting", f"{path}, line {number}: {rule}", field="load")
        entries.append(entry)
    if not entries:
        raise PageddError("invalid_setting", f"{path} holds no request; write one a line", field="load")
    return entries
