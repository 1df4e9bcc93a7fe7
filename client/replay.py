"""`pagectl replay`: sends the requests of a log again, at the pace at which they came, and says how that went.

Owns the pace and the sums. A request of which the log has only lengths gets a prompt of random ids; each answer is as
long as it was.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from pagedd.client.aio import AsyncClient
from pagedd.client.errors import PageddError
from pagedd.client.request_log import LoggedRequest, Prompts, arrivals_s

# In every vocabulary, and no special id in most.
_IDS = range(10, 250)
# No context is longer, and the daemon says so of what is.
_MAX_IDS = 1 << 20


@dataclass(slots=True)
class Replayed:
    """Sums over all requests.

    Attributes:
        seconds: from the first request to the last answer.
        first_token_s: of each that was answered, since it was sent.
        late_s: the most by which one was sent too late.
        failures: how many by code.
    """

    seconds: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    first_token_s: list[float] = field(default_factory=list)
    late_s: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)

    def lines(self) -> list[str]:
        """For people."""
        times = sorted(self.first_token_s)
        rate = self.num_output_tokens / self.seconds if self.seconds else 0.0
        told = [
            f"answered {len(times)} in {self.seconds:.1f} s: "
            f"{self.num_prompt_tokens} tokens in, {self.num_output_tokens} out, {rate:.0f} out a second"
        ]
        if times:
            p50, p95 = (1000 * times[min(len(times) - 1, int(share * len(times)))] for share in (0.5, 0.95))
            told.append(f"first token after {p50:.0f} ms (p50), {p95:.0f} ms (p95)")
        told += [f"{count} ended with {code}" for code, count in self.failures.most_common()]
        if self.late_s > 1:
            told.append(f"this client was up to {self.late_s:.1f} s behind; a smaller --speed is kept")
        return told


async def replay(client: AsyncClient, entries: Sequence[LoggedRequest], speed: float = 1.0) -> Replayed:
    """`speed` 2 sends twice as fast as recorded. A request that fails is counted, and the others go on.

    Raises `PageddError("daemon_unreachable")` when no daemon answers at the beginning.
    """
    await client.ping()
    replayed = Replayed()
    started_s = time.monotonic()
    prompts = Prompts(entries, _IDS, _MAX_IDS)
    async with asyncio.TaskGroup() as group:
        for arrival_s, entry in sorted(zip(arrivals_s(entries), entries, strict=True), key=itemgetter(0)):
            due_s = started_s + arrival_s / speed
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            replayed.late_s = max(replayed.late_s, time.monotonic() - due_s)
            group.create_task(_send(client, entry, prompts.next(entry), replayed))
    replayed.seconds = time.monotonic() - started_s
    return replayed


async def _send(client: AsyncClient, entry: LoggedRequest, ids: list[int], replayed: Replayed) -> None:
    sent_s, first_s = time.monotonic(), None
    generation = client.generate(
        prompt_token_ids=ids,
        priority=entry.priority,
        n=entry.n,
        max_tokens=entry.output_tokens,
        ignore_eos=True,
        temperature=1.0 if entry.n > 1 else 0.0,
    )
    try:
        async for _ in generation:
            first_s = first_s or time.monotonic()
        done = await generation
    except PageddError as error:
        replayed.failures[error.code] += 1
        return
    replayed.num_prompt_tokens += done.usage.prompt_tokens
    replayed.num_output_tokens += done.usage.completion_tokens
    replayed.first_token_s.append((first_s or time.monotonic()) - sent_s)
