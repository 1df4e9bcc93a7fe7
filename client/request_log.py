"""A log of requests, one JSON object a line: what the daemon writes (`request_log`), `pagectl replay` and tune read.

Owns the form of a line, and the prompt of one that has only lengths. Token counts and ids only, never a text.
"""

import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from pagedd.client.errors import PageddError


class LoggedRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One request. Only what has to be said is written: `{"prompt_tokens": 512, "output_tokens": 64}` will do.

    Attributes:
        time_s: when it came, Unix time; in a log made by hand any other beginning, or 0 for all.
        after_s: how long after the one on the line before it came, by a clock that nobody sets; negative when it came
            before that one. None, as in a log made by hand, is what `time_s` says.
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
    after_s: float | None = None
    n: int = 1
    priority: int = 0


_decoder = msgspec.json.Decoder(LoggedRequest)
# A log is read whole. What is longer is none, or that of months; a daemon's two files together have as many bytes.
_MAX_LINES = 1_000_000
_MAX_LINE_BYTES = 16 << 20
_MAX_BYTES = 128 << 20


class Prompts:
    """Prompts of `entries`, of random ids where the log has only lengths; their beginnings are alike where it says so.

    Args:
        ids: what is drawn from.
        most: ids of a prompt at most.
    """

    def __init__(self, entries: Sequence[LoggedRequest], ids: Sequence[int], most: int) -> None:
        self._ids = ids
        self._most = most
        longest = min(most, max(entry.system_tokens for entry in entries))
        self._system = random.Random(0).choices(ids, k=longest)
        self._draw = random.Random(1)

    def next(self, entry: LoggedRequest) -> list[int]:
        """Another one each time, but for the beginning."""
        if entry.prompt_token_ids is not None:
            return entry.prompt_token_ids[: self._most]
        num_ids = min(entry.prompt_tokens, self._most)
        shared = self._system[: min(entry.system_tokens, num_ids)]
        return shared + self._draw.choices(self._ids, k=num_ids - len(shared))


def arrivals_s(entries: Sequence[LoggedRequest]) -> list[float]:
    """When each came, seconds since the first of all. A clock that was set in between does not count."""
    arrivals = [0.0]
    for before, entry in pairwise(entries):
        gap_s = entry.time_s - before.time_s if entry.after_s is None else entry.after_s
        arrivals.append(arrivals[-1] + gap_s)
    first_s = min(arrivals)
    return [arrival_s - first_s for arrival_s in arrivals]


def read_log(path: Path, field: str) -> list[LoggedRequest]:
    """In the order of the file. Raises `PageddError("invalid_setting")`, which blames `field` and names the line."""
    entries, num_bytes = [], 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE_BYTES + 1), b""), 1):
                num_bytes += len(line)
                if number > _MAX_LINES or len(line) > _MAX_LINE_BYTES or num_bytes > _MAX_BYTES:
                    limits = (
                        f"a log has at most {_MAX_LINES} lines of {_MAX_LINE_BYTES} bytes, {_MAX_BYTES} in all; "
                        "give a part of it"
                    )
                    raise PageddError("invalid_setting", f"{path}, line {number}: {limits}", field=field)
                if line.strip():
                    entries.append(_entry(line, f"{path}, line {number}", field))
    except OSError as error:
        raise PageddError("invalid_setting", f"{path} cannot be read: {error.strerror}", field=field) from None
    if not entries:
        raise PageddError("invalid_setting", f"{path} holds no request; write one a line", field=field)
    return entries


def _entry(line: bytes, where: str, field: str) -> LoggedRequest:
    try:
        entry = _decoder.decode(line)
    except msgspec.MsgspecError as error:
        raise PageddError("invalid_setting", f"{where}: {error}", field=field) from None
    has_prompt = bool(entry.prompt_token_ids) or entry.prompt_tokens > 0
    if entry.output_tokens < 1 or entry.n < 1 or entry.system_tokens < 0 or not has_prompt:
        rule = "output_tokens and the prompt's ids or length, and n, must be at least 1, system_tokens at least 0"
        raise PageddError("invalid_setting", f"{where}: {rule}", field=field)
    return entry
