"""The load that settings are tried under: a synthetic chat, or what a log of requests recorded.

A log is what `client/request_log.py` reads: of a prompt its ids, or only its length. Its text is then random and shares
nothing but `system_tokens`. When requests came is not heeded: here users ask one after another.
"""

import itertools
import random
from collections.abc import Iterator, Sequence

from pagedd.client.request_log import LoggedRequest, Prompts
from pagedd.daemon.tune.users import Asked, User

SYSTEM_TOKENS = 256
_LEAST_ID = 10  # below are special ids, in most vocabularies


def synthetic_load(num_requests: int = 256, seed: int = 7) -> list[LoggedRequest]:
    """Chats after one system prompt: 32 to 256 tokens asked, 32 to 128 answered."""
    draw = random.Random(seed)
    return [
        LoggedRequest(
            system_tokens=SYSTEM_TOKENS,
            prompt_tokens=SYSTEM_TOKENS + draw.randint(32, 256),
            output_tokens=draw.randint(32, 128),
        )
        for _ in range(num_requests)
    ]


def make_users(
    entries: Sequence[LoggedRequest], num_users: int, vocab_size: int, max_request_tokens: int
) -> list[User]:
    """Users who take the entries in turn, again and again, cut to what can be served.

    Random text differs from turn to turn, the system prompt does not.
    """
    prompts = Prompts(entries, range(min(_LEAST_ID, vocab_size - 1), vocab_size), max_request_tokens)

    def asked() -> Iterator[Asked]:
        for entry in itertools.cycle(entries):
            ids = [id % vocab_size for id in prompts.next(entry)[: max_request_tokens - 1]]
            yield Asked(ids, max(1, min(entry.output_tokens, max_request_tokens - len(ids))))

    backlog = asked()

    def user() -> User:
        while True:
            yield next(backlog)

    return [user() for _ in range(num_users)]
