"""Users of an engine in this process: turn after turn, what is timed, and what is left when time is over."""

import itertools
from collections.abc import Callable, Iterator

import pytest

from pagedd.daemon.tune.users import Asked, Measured, User, measure
from pagedd.engine.config import SchedulerConfig
from pagedd.engine.engine import Engine
from pagedd.engine.kv.block_manager import BlockManager
from pagedd.engine.scheduler import Scheduler
from pagedd.engine.step import Runner, Sampled, Step


class Counting(Runner):
    """Draws the number of the step, so that answers can be told apart."""

    def run(self, step: Step) -> list[Sampled]:
        return [Sampled(100 + step.number) for item in step.scheduled for _ in item.samplers]


def make_engine(num_blocks: int = 16) -> Engine:
    config = SchedulerConfig(
        block_size=4, num_blocks=num_blocks, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=32
    )
    return Engine(Counting(), Scheduler(config, BlockManager(num_blocks, 4)))


def ticking() -> Callable[[], float]:
    """A clock that goes on by one second whenever it is read: once at the start, then once a step."""
    seconds = itertools.count()
    return lambda: float(next(seconds))


def test_a_user_goes_on_from_what_was_answered() -> None:
    heard: list[list[int]] = []

    def talk() -> User:
        answer = yield Asked([1, 2, 3], 2)
        heard.append(answer)
        heard.append((yield Asked([1, 2, 3, *answer, 4], 1)))

    measured = measure(make_engine(), [talk()], seconds=100, clock=ticking())
    assert heard == [[100, 101], [102]]
    assert (measured.num_output_tokens, measured.num_steps, measured.error) == (3, 3, "")
    assert measured.first_token_s == [1.0, 1.0]
    assert measured.latency_s == [2.0, 1.0]


def test_only_what_comes_after_the_warm_up_counts() -> None:
    def ask_for_ever() -> User:
        while True:
            yield Asked([1, 2], 2)

    measured = measure(make_engine(), [ask_for_ever()], seconds=4, warmup_s=3, clock=ticking())
    # Steps end at 1 ... 7; those from 3 on are measured, and the first of them began before.
    assert (measured.num_steps, measured.seconds, measured.num_output_tokens) == (5, 4.0, 5)
    assert measured.mean_running in (0.4, 0.6)  # a sequence leaves its seat with its last token


def test_what_is_under_way_when_time_is_over_leaves_nothing_behind() -> None:
    def ask_much() -> User:
        yield Asked([1, 2], 20)

    engine = make_engine()
    measured = measure(engine, [ask_much(), ask_much()], seconds=3, clock=ticking())
    assert measured.latency_s == []
    assert not engine.has_work
    assert engine.stats().num_blocks_used == 0
    engine.check_integrity()


def test_users_who_share_what_they_ask_for_end_when_it_is_all_done() -> None:
    backlog = iter([Asked([n, n], 1) for n in range(5)])

    def take_from(asked: Iterator[Asked]) -> User:
        while (one := next(asked, None)) is not None:
            yield one

    measured = measure(make_engine(), [take_from(backlog) for _ in range(2)], seconds=100, clock=ticking())
    assert len(measured.latency_s) == 5


def test_requests_a_second_are_counted_from_one_end_to_another() -> None:
    # Three batches of two, three seconds apart, in a time that is no multiple of that.
    measured = Measured(seconds=8.0, ended_s=[1.0, 1.0, 4.0, 4.0, 7.0, 7.0])
    assert measured.requests_per_s == pytest.approx(2 / 3)
    assert Measured(seconds=8.0).requests_per_s == 0.0
    assert Measured(seconds=8.0, ended_s=[1.0, 1.0]).requests_per_s == 0.0
