"""One step of the engine: what the scheduler hands to the runner, and what comes back. No torch."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Protocol

from pagedd.engine.kv.stored_block import BlockCopy
from pagedd.engine.request import TokenLogprobs
from pagedd.engine.sequence import Sequence


@dataclass(slots=True, eq=False)
class ScheduledSequence:
    """`sequence` computes tokens [start, start + num_scheduled_tokens) in this step.

    Attributes:
        start: the sequence's `num_computed_tokens` when it was scheduled.
        samplers: the sequences that draw a token from this one's last row: none in the middle of a prefill, itself when
            its last known token is computed, and its forks (n > 1) when a prompt is first complete.
        draft_token_ids: guesses at what follows, computed as the last of the scheduled tokens (see `speculation.py`).
            With a draft, the one sampler draws from the row before each guess and from the last: len + 1 times.
    """

    sequence: Sequence
    start: int
    num_scheduled_tokens: int
    samplers: list[Sequence] = field(default_factory=list)
    draft_token_ids: list[int] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        """The tokens that are computed, guesses included."""
        end = self.start + self.num_scheduled_tokens - len(self.draft_token_ids)
        return self.sequence.token_ids[self.start : end] + self.draft_token_ids

    @property
    def num_draws(self) -> int:
        return len(self.samplers) + len(self.draft_token_ids)


@dataclass(slots=True, eq=False)
class Step:
    """One batch, and the copies of whole blocks that are done before any of its writes, in this order.

    A fork's tail may be given back after its copy was asked for, and be loaded into at once, so copies come before
    loads. Never the other way round: what is loaded is full, and a tail that is copied is not.

    The runner empties each list once it is done: after a fault the step runs again in parts, and a copy made twice
    would undo what was written in between.

    Attributes:
        block_saves: evicted blocks to host memory, before they are written to.
        block_copies: (source, destination), the copy-on-write of forked tails.
        block_loads: from host memory into blocks that sequences of this step, or of a later one, begin with.
        has_transfers: there were saves or loads.
    """

    number: int
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    block_saves: list[BlockCopy] = field(default_factory=list)
    block_loads: list[BlockCopy] = field(default_factory=list)
    has_transfers: bool = False

    def part(self, item: ScheduledSequence) -> "Step":
        """A step of one sequence alone; it shares what has to be copied first."""
        return Step(self.number, [item], self.block_copies, self.block_saves, self.block_loads)

    @property
    def num_scheduled_tokens(self) -> int:
        return sum(item.num_scheduled_tokens for item in self.scheduled)

    @property
    def num_chunk_tokens(self) -> int:
        """Of sequences that compute more than one."""
        return sum(item.num_scheduled_tokens for item in self.scheduled if item.num_scheduled_tokens > 1)


@dataclass(slots=True)
class Sampled:
    """One drawn token, or the reason why there is none (`error_code`, and then the other fields mean nothing)."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error_code: str | None = None


class LaunchedStep(Protocol):
    """A step on its way through the device."""

    @property
    def has_failed(self) -> bool:
        """It could not be launched, and nothing may be launched on top of it. A fault on the device shows later."""
        ...

    def result(self) -> list[Sampled]:
        """Waits; what `Runner.run` returns. Raises what the launch or the device failed with."""
        ...


class Runner(ABC):
    """Whatever computes a step: the real model (`runner.py`), or a fake in tests.

    Attributes:
        seconds: sums the time of each part of all steps: prepare, forward, sample.
        runs_ahead: has a `launch` that returns before the step is computed.
    """

    runs_ahead = False

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def save_blocks(self, copies: list[BlockCopy]) -> None:
        """Copies blocks to host memory beside whatever runs; before the next step writes to one, its copy is made."""
        raise NotImplementedError(f"{type(self).__name__} copies no blocks")

    def finish_saves(self) -> None:  # noqa: B027 (a copy that is made at once is finished)
        """Waits for the copies that steps and `save_blocks` began."""

    def read_block(self, block_id: int) -> bytearray:
        """A block's bytes; nothing may be on its way."""
        raise NotImplementedError(f"{type(self).__name__} copies no blocks")

    @abstractmethod
    def run(self, step: Step) -> list[Sampled]:
        """Returns `num_draws` tokens for each of `step.scheduled`, in order."""

    def launch(self, step: Step) -> LaunchedStep:
        """Starts a step; they are computed in the order of their launch. Raises nothing: `result` does.

        A `PENDING` token is the one that the step launched before draws for that sequence.
        """
        raise NotImplementedError(f"{type(self).__name__} does not run ahead")

    def check_device(self) -> None:  # noqa: B027 (nothing to check is the rule)
        """After a fault. Raises `DeviceLostError` when the device answers nothing any more, whoever asks."""
