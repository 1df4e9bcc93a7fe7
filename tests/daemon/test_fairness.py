"""A greedy caller beside a calm one: the real scheduler, quotas and turns, over a fake clock and a box of even speed.

A step takes 2 ms and a quarter of a millisecond for each token, so the box computes just under 4000 tokens a second.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from pagedd.client.errors import PageddError
from pagedd.client.protocol import Generate, Sampling
from pagedd.daemon.admission import to_engine_request
from pagedd.daemon.caller import Caller
from pagedd.daemon.config import DaemonConfig
from pagedd.daemon.fair_share import Turns
from pagedd.daemon.metering import Meter, Metering
from pagedd.daemon.quota_config import QuotaConfig, QuotaLimits
from pagedd.engine.config import SchedulerConfig
from pagedd.engine.kv.block_manager import BlockManager
from pagedd.engine.scheduler import Scheduler
from pagedd.engine.step import Sampled

from .scripted_host import engine_info, engine_stats

CALM, GREEDY = Caller(uid=1001), Caller(uid=1002)
STEP_S, TOKEN_S = 0.002, 0.00025
INFO = engine_info(num_blocks=1024, max_num_seqs=8)


@dataclass
class Live:
    meter: Meter
    arrival_s: float
    first_token_s: float | None = None


@dataclass
class Box:
    """One daemon's worth of decisions, without sockets, text and model."""

    quota: QuotaConfig
    now_s: float = 0.0
    live: dict[str, Live] = field(default_factory=dict)
    num_refused: int = 0

    def __post_init__(self) -> None:
        config = SchedulerConfig(
            block_size=INFO.block_size,
            num_blocks=INFO.num_blocks,
            max_num_seqs=INFO.max_num_seqs,
            max_num_batched_tokens=512,
            max_model_len=INFO.max_model_len,
        )
        blocks = BlockManager(INFO.num_blocks, INFO.block_size)
        self.scheduler = Scheduler(config, blocks, clock=lambda: self.now_s)
        self.metering = Metering(DaemonConfig(quota=self.quota), clock=lambda: self.now_s)
        self.draw = random.Random(7)
        self.busy_s = 0.0
        self.num_started = 0

    def ask(self, caller: Caller, num_prompt: int, num_output: int) -> Live | None:
        """None when it is refused."""
        self.num_started += 1
        message = Generate(
            id=str(self.num_started),
            prompt_token_ids=[self.draw.randrange(250) for _ in range(num_prompt)],
            sampling=Sampling(max_tokens=num_output),
        )
        live = Live(self.metering.open(caller), self.now_s)
        request = to_engine_request(
            message, message.id, message.prompt_token_ids or [], INFO, eos_token_ids=[], cache_extras=()
        )
        try:
            self.metering.enter([(live.meter, message)], 1, INFO)
            [request] = self.metering.admit([(live.meter, request)], INFO)
        except PageddError:
            self.num_refused += 1
            return None
        self.live[message.id] = live
        self.scheduler.add(request)
        return live

    def step(self) -> None:
        """Computes a step, or lets a millisecond go by."""
        if not self.scheduler.has_work:
            self.now_s += 0.001
            return
        step = self.scheduler.schedule()
        seconds = STEP_S + TOKEN_S * step.num_scheduled_tokens
        self.now_s += seconds
        self.busy_s += seconds
        outputs = self.scheduler.commit(step, [Sampled(1) for item in step.scheduled for _ in item.samplers])
        num_first = 0
        for output in outputs:
            live = self.live[output.request_id]
            self.metering.produced(live.meter, output)
            if live.first_token_s is None and output.token_ids:
                num_first += 1
                live.first_token_s = self.now_s - live.arrival_s
            if output.finish_reason is not None:
                self.metering.leave(live.meter, is_callers_doing=True)
                del self.live[output.request_id]
        stats = engine_stats(step_seconds={"forward": self.busy_s}, num_scheduled_tokens=step.num_scheduled_tokens)
        self.metering.stepped(stats, len(outputs) - num_first)


def calm_p95_s(box: Box, attempts: Iterator[None] | None = None, num_requests: int = 60) -> float:
    """The 95th percentile of the calm caller's time to first token: a chat turn of 400 tokens, once a second."""
    first_token_s = []
    for number in range(num_requests):
        live = None
        while live is None or live.first_token_s is None or box.now_s < number + 1.0:
            if live is None:
                live = box.ask(CALM, 400, 16)
                assert live is not None, "nobody takes the calm caller's quota"
            if attempts is not None:
                next(attempts)
            box.step()
        first_token_s.append(live.first_token_s)
    return sorted(first_token_s)[int(0.95 * num_requests)]


def greedy(box: Box, tokens_per_s: float, num_prompt: int = 100, num_output: int = 50) -> Iterator[None]:
    """Asks for so many tokens a second, whatever it is told."""
    due_s = box.now_s
    while True:
        while due_s <= box.now_s:
            box.ask(GREEDY, num_prompt, num_output)
            due_s += (num_prompt + num_output) / tokens_per_s
        yield


def test_at_ten_times_its_quota_a_greedy_caller_does_not_double_the_others_wait_for_a_first_token() -> None:
    quota = QuotaConfig(user={"1002": QuotaLimits(tokens_per_minute=24_000, max_requests=4)})
    alone_s = calm_p95_s(Box(quota))
    box = Box(quota)
    beside_s = calm_p95_s(box, greedy(box, 10 * 24_000 / 60))
    assert box.num_refused > 0.7 * box.num_started
    assert beside_s <= 2 * alone_s


def test_without_a_quota_the_same_load_would_hold_the_others_up() -> None:
    alone_s = calm_p95_s(Box(QuotaConfig()), num_requests=6)
    box = Box(QuotaConfig(weight=100.0))  # turns count for nothing
    assert calm_p95_s(box, greedy(box, 10 * 24_000 / 60), num_requests=6) > 5 * alone_s


def test_turns_alone_let_a_newcomer_pass_those_who_have_filled_the_queue() -> None:
    box = Box(QuotaConfig())
    box.ask(GREEDY, 100, 50)
    while box.live:
        box.step()  # the box knows its speed now
    waiting = [box.ask(GREEDY, 400, 200) for _ in range(64)]
    for _ in range(20):
        box.step()
    calm = box.ask(CALM, 400, 16)
    assert calm is not None
    while calm.first_token_s is None:
        box.step()
    assert calm.first_token_s < 0.3
    assert sum(live is not None and live.first_token_s is None for live in waiting) > 40


def test_those_who_both_have_much_in_flight_get_turns_by_their_weight() -> None:
    box = Box(QuotaConfig(user={"1001": QuotaLimits(weight=3.0)}))
    box.ask(GREEDY, 100, 50)
    while box.live:
        box.step()
    asked = [(caller, box.ask(caller, 300, 100)) for _ in range(60) for caller in (GREEDY, CALM)]
    while sum(live is not None and live.first_token_s is not None for _, live in asked) < 60:
        box.step()
    begun = [caller for caller, live in asked if live is not None and live.first_token_s is not None]
    assert 2.2 < begun.count(CALM) / begun.count(GREEDY) < 3.8


# One caller's turns. The box computes 100 tokens a second; a point of priority is half a second.


def take(
    turns: Turns,
    tokens: int = 100,
    asked: int = 0,
    now_s: float = 0.0,
    weight: float = 1.0,
    speed: float | None = 100.0,
) -> int:
    return turns.take(asked, tokens, weight=weight, tokens_per_s=speed, ageing_s_per_point=0.5, now_s=now_s)


def test_a_request_waits_a_little_longer_for_each_token_that_its_caller_has_in_flight() -> None:
    turns = Turns()
    assert [take(turns, tokens) for tokens in (1, 49, 1, 449, 1)] == [0, -1, -1, -2, -10]


def test_weight_makes_it_less() -> None:
    turns = Turns()
    assert [take(turns, 500, weight=10.0) for _ in range(3)] == [0, -1, -2]


def test_what_is_less_urgent_does_not_count_against_what_is_more() -> None:
    turns = Turns()
    assert [take(turns, asked=-50) for _ in range(3)] == [-50, -52, -54]
    assert take(turns, asked=0) == 0
    assert take(turns, asked=-50) == -58


def test_nobody_goes_below_the_lowest_priority() -> None:
    turns = Turns()
    take(turns, 10**9)
    assert take(turns) == -100


def test_a_caller_s_requests_stay_in_order_whatever_has_ended_meanwhile() -> None:
    turns = Turns()
    take(turns, 500)
    take(turns, 10)
    second = 0.0 - 0.5 * take(turns, 10)
    turns.give(0, 500)
    third = 1.0 - 0.5 * take(turns, now_s=1.0)
    assert third >= second


def test_with_nothing_in_flight_a_caller_begins_anew() -> None:
    turns = Turns()
    take(turns, 5000)
    take(turns, 10)
    turns.give(0, 5000)
    turns.give(0, 10)
    assert take(turns, 50) == 0
    assert take(turns) == -1


def test_while_the_box_s_speed_is_not_known_nobody_waits_longer() -> None:
    turns = Turns()
    assert [take(turns, 500, speed=None) for _ in range(3)] == [0, 0, 0]


@pytest.mark.parametrize("num_choices", [1, 4])
def test_a_request_that_leaves_gives_back_what_it_did_not_use_and_no_prompt_that_the_engine_had(
    num_choices: int,
) -> None:
    box = Box(QuotaConfig(tokens_per_minute=1000))
    message = Generate(id="1", prompt_token_ids=[1] * 100, sampling=Sampling(max_tokens=50, n=num_choices))
    meter = box.metering.open(CALM)
    request = to_engine_request(message, "1", [1] * 100, INFO, eos_token_ids=[], cache_extras=())
    box.metering.enter([(meter, message)], 1, INFO)
    box.metering.admit([(meter, request)], INFO)
    assert meter.account.allowance.tokens_left == 900 - 50 * num_choices
    box.metering.leave(meter, is_callers_doing=True)
    assert meter.account.allowance.tokens_left == 900


def test_what_the_engine_did_not_do_costs_nothing() -> None:
    box = Box(QuotaConfig(tokens_per_minute=1000))
    live = box.ask(CALM, 100, 50)
    assert live is not None
    box.metering.leave(live.meter, is_callers_doing=False)
    assert live.meter.account.allowance.tokens_left == 1000
