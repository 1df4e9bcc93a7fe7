"""Users of an engine in this process: each asks, reads the answer, and asks again; what they saw is timed.

Owns the loop around `Engine.step` and its clock. A user is a generator that yields what it asks for and is sent the
tokens of the answer, so that a conversation can go on from what was said. Knows no sockets and no text.
"""

import itertools
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from pagedd.engine.request import Request, SequenceOutput
from pagedd.engine.sampling_params import SamplingParams
from pagedd.engine.stats import EngineStats


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt and how many tokens shall follow it: greedy, without regard to the end of text."""

    prompt_token_ids: list[int]
    num_output_tokens: int


User = Generator[Asked, list[int], None]


class Serving(Protocol):
    """What `measure` needs of `engine.engine.Engine`."""

    @property
    def has_work(self) -> bool: ...
    def add(self, request: Request) -> None: ...
    def abort(self, request_id: str, choice_index: int | None = None) -> bool: ...
    def step(self) -> list[SequenceOutput]: ...
    def stats(self) -> EngineStats: ...


@dataclass(slots=True)
class Measured:
    """What happened in `seconds` of steady load. Sums over steps are of the moments after each.

    Attributes:
        first_token_s: of each request whose first token came in that time, since it was asked.
        latency_s: the same of each that ended.
        ended_s: when, by the clock.
        error: why it broke off, empty when it did not.
    """

    seconds: float = 0.0
    num_steps: int = 0
    num_output_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    sum_running: int = 0
    sum_live_tokens: int = 0
    sum_used_blocks: int = 0
    first_token_s: list[float] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)
    ended_s: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def output_tokens_per_s(self) -> float:
        return self.num_output_tokens / self.seconds if self.seconds else 0.0

    @property
    def requests_per_s(self) -> float:
        """From one moment at which requests ended to the last: many may end together, and seldom."""
        if not self.ended_s or self.ended_s[-1] == self.ended_s[0]:
            return 0.0
        first_s, last_s = self.ended_s[0], self.ended_s[-1]
        return sum(ended_s > first_s for ended_s in self.ended_s) / (last_s - first_s)

    @property
    def mean_running(self) -> float:
        """Sequences that had a seat."""
        return self.sum_running / self.num_steps if self.num_steps else 0.0


@dataclass(slots=True, eq=False)
class _Live:
    user: User
    asked: Asked
    asked_s: float
    token_ids: list[int] = field(default_factory=list)


def measure(
    engine: Serving,
    users: Iterable[User],
    *,
    seconds: float,
    warmup_s: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
) -> Measured:
    """Lets `users` ask for `warmup_s` and then for `seconds`, which are measured; ends earlier when all are done.

    What is still under way then is aborted, so that the engine is idle when this returns. A request that fails, or that
    can never be served, ends the run: `error` says why.
    """
    live: dict[str, _Live] = {}
    numbers = itertools.count()
    measured = Measured()

    def ask(user: User, asked: Asked | None, now_s: float) -> None:
        if asked is None:
            return
        request_id = f"tune-{next(numbers)}"
        engine.add(_request(request_id, asked))
        live[request_id] = _Live(user, asked, now_s)

    try:
        started_s = clock()
        for user in users:
            ask(user, next(user, None), started_s)
        from_s, until_s = started_s + warmup_s, started_s + warmup_s + seconds
        now_s, before = started_s, engine.stats()
        while engine.has_work and now_s < until_s and not measured.error:
            outputs = engine.step()
            earlier_s, now_s = now_s, clock()
            is_measured = now_s >= from_s
            if is_measured:
                measured.seconds += now_s - max(earlier_s, from_s)
            else:
                before = engine.stats()
            for output in outputs:
                if (one := live.get(output.request_id)) is None:
                    continue
                if output.error_code is not None:
                    measured.error = f"{output.error_code}: {output.error_message}"
                    break
                if is_measured:
                    _note(measured, one, output, now_s)
                one.token_ids += output.token_ids
                if output.finish_reason is not None:
                    del live[output.request_id]
                    ask(one.user, _answer(one.user, one.token_ids), now_s)
            if is_measured:
                _note_step(measured, engine.stats(), before)
    finally:
        for request_id in live:
            engine.abort(request_id)
        while engine.has_work:  # a step that is on its way
            engine.step()
    return measured


def _note(measured: Measured, one: _Live, output: SequenceOutput, now_s: float) -> None:
    measured.num_output_tokens += len(output.token_ids)
    if output.token_ids and not one.token_ids:
        measured.first_token_s.append(now_s - one.asked_s)
        measured.num_prompt_tokens += len(one.asked.prompt_token_ids)
        measured.num_cached_tokens += output.num_cached_tokens
    if output.finish_reason is not None:
        measured.latency_s.append(now_s - one.asked_s)
        measured.ended_s.append(now_s)


def _note_step(measured: Measured, stats: EngineStats, before: EngineStats) -> None:
    measured.num_steps += 1
    measured.sum_running += stats.num_requests_running
    measured.sum_live_tokens += stats.num_live_tokens
    measured.sum_used_blocks += stats.num_blocks_used
    measured.num_preemptions = stats.preemptions_total - before.preemptions_total


def _answer(user: User, token_ids: list[int]) -> Asked | None:
    try:
        return user.send(token_ids)
    except StopIteration:
        return None


def _request(request_id: str, asked: Asked) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=asked.prompt_token_ids,
        params=SamplingParams(max_tokens=asked.num_output_tokens, temperature=0.0),
    )
