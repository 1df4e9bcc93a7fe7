"""The load that settings are tried under: a synthetic chat, or what a log of requests recorded.

A log is JSON lines, one a request: `{"prompt_token_ids": [...], "output_tokens": 64}`, or only the length of the
prompt, `{"prompt_tokens": 512, "output_tokens": 64}`, whose text is then random and shares nothing.
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from pagedd.client.errors import PageddError
from pagedd.daemon.tune.users import Asked, User

SYSTEM_TOKENS = 256
_LEAST_ID = 10  # below are special ids, in most vocabularies


class Entry(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One request. Without `prompt_token_ids` its prompt is `system_tokens` that all share, and random ones."""

    output_tokens: int
    prompt_token_ids: list[int] | None = None
    prompt_tokens: int = 0
    system_tokens: int = 0


def synthetic_load(num_requests: int = 256, seed: int = 7) -> list[Entry]:
    """Chats after one system prompt: 32 to 256 tokens asked, 32 to 128 answered."""
    draw = random.Random(seed)
    return [
        Entry(
            system_tokens=SYSTEM_TOKENS,
            prompt_tokens=SYSTEM_TOKENS + draw.randint(32, 256),
            output_tokens=draw.randint(32, 128),
        )
        for _ in range(num_requests)
    ]


def read_log(path: Path) -> list[Entry]:
    """Raises `PageddError("invalid_setting")` with the line that is wrong."""
    decoder = msgspec.json.Decoder(Entry)
    entries = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise PageddError("invalid_setting", f"load = {path}: {error.strerror}", field="load") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise PageddError("invalid_setting", f"{path}, line {number}: {error}", field="load") from None
        has_prompt = bool(entry.prompt_token_ids) or entry.prompt_tokens > 0
        if entry.output_tokens < 1 or entry.system_tokens < 0 or not has_prompt:
            rule = "output_tokens and the prompt's ids or length must be at least 1, system_tokens at least 0"
            raise PageddError("invalid_setting", f"{path}, line {number}: {rule}", field="load")
        entries.append(entry)
    if not entries:
        raise PageddError("invalid_setting", f"{path} holds no request; write one a line", field="load")
    return entries


def make_users(entries: Sequence[Entry], num_users: int, vocab_size: int, max_request_tokens: int) -> list[User]:
    """Users who take the entries in turn, again and again, cut to what can be served.

    Random text differs from turn to turn, the system prompt does not.
    """
    draw = random.Random(11)
    longest = min(max_request_tokens, max(entry.system_tokens for entry in entries))
    system = _ids(random.Random(0), longest, vocab_size)

    def asked() -> Iterator[Asked]:
        for entry in itertools.cycle(entries):
            ids = entry.prompt_token_ids
            if ids is None:
                num_tokens = min(entry.prompt_tokens, max_request_tokens)
                shared = system[: min(entry.system_tokens, num_tokens)]
                ids = shared + _ids(draw, num_tokens - len(shared), vocab_size)
            ids = [id % vocab_size for id in ids[: max_request_tokens - 1]]
            yield Asked(ids, max(1, min(entry.output_tokens, max_request_tokens - len(ids))))

    backlog = asked()

    def user() -> User:
        while True:
            yield next(backlog)

    return [user() for _ in range(num_users)]


def _ids(draw: random.Random, number: int, vocab_size: int) -> list[int]:
    return [draw.randrange(min(_LEAST_ID, vocab_size - 1), vocab_size) for _ in range(number)]
