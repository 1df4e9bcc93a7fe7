"""Fairness and money for `service.py`: what each request holds of its caller's quota, when its turn is, who pays.

Ties accounts, quotas, turns and costs together, for the life of a request: `enter` at the door, `admit` when its tokens
are counted, `produced` with each step, `leave` at its end.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from pagedd.client.protocol import Chat, Generate
from pagedd.client.questions import UsageReport
from pagedd.client.usage import CallerUsage
from pagedd.daemon.accounts import Account, Accounts
from pagedd.daemon.admission import token_bounds
from pagedd.daemon.caller import Caller
from pagedd.daemon.config import DaemonConfig
from pagedd.daemon.cost import CostMeter
from pagedd.daemon.quota import Hold, Need, QuotaRefusal, least_need_of, need_of
from pagedd.daemon.quota_config import QuotaConfig
from pagedd.daemon.telemetry import Figures
from pagedd.engine.info import EngineInfo
from pagedd.engine.request import Request, SequenceOutput
from pagedd.engine.stats import EngineStats


@dataclass(slots=True, eq=False)
class Meter:
    """One live request's. Mutated only by `Metering`.

    Attributes:
        num_prompt_tokens: once the engine has it; they are used up from then on, since it may compute them at any time.
        is_computed: its first token has come.
        turn: the priority and the tokens that its turn was taken with.
    """

    account: Account
    hold: Hold = field(default_factory=Hold)
    turn: tuple[int, int] | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    is_computed: bool = False


class Metering:
    """Every caller's quota and costs. One event loop; every method runs in it.

    Args:
        clock: seconds, monotonic; replaceable so that tests decide what time it is.
    """

    def __init__(self, config: DaemonConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.accounts = Accounts(config.quota, clock)
        self.costs = CostMeter(config.cost, self.accounts, clock())
        self._clock = clock
        self._ageing_s_per_point = config.ageing_s_per_point

    def replace_quotas(self, quotas: QuotaConfig) -> None:
        """Other limits from now on, also for requests in flight. Raises nothing: `QuotaConfig` is valid."""
        self.accounts.replace_quotas(quotas)

    # A request's life

    def open(self, caller: Caller) -> Meter:
        return Meter(self.accounts.of(caller))

    def enter(self, asked: Sequence[tuple[Meter, Generate | Chat]], max_token_bytes: int, info: EngineInfo) -> None:
        """At the door: the prompts of one request. `max_token_bytes` is the length of the longest token.

        Holds the fewest tokens that they may need, so that what is certainly too much is refused before it costs
        anything. Raises `PageddError`: `over_quota`, `exceeds_quota`.
        """
        account, pool_tokens = asked[0][0].account, _pool_tokens(info)
        allowance = account.allowance
        bounds = [
            token_bounds(message, max_token_bytes, allowance.most_tokens(message.sampling.n, pool_tokens))
            for _, message in asked
        ]
        holds = [
            (meter.hold, least_need_of(prompt, message.sampling.n, output, info.block_size))
            for (meter, message), (prompt, output, _) in zip(asked, bounds, strict=True)
        ]
        with _counting_refusals(account):
            for _, message in asked:
                allowance.check_priority(message.priority)
            allowance.hold(holds, pool_tokens, most_tokens=sum(each.most for each in bounds))

    @contextmanager
    def in_flight(self, caller: Caller) -> Iterator[None]:
        """What needs no engine is a request in flight of its caller's too, of no tokens. Raises like `enter`."""
        account, hold = self.accounts.of(caller), Hold()
        with _counting_refusals(account):
            account.allowance.hold([(hold, Need(num_choices=1, num_tokens=0, num_kv_tokens=0))], pool_tokens=0)
        try:
            yield
        finally:
            account.allowance.release(hold, 0)

    def most_output_tokens(
        self, meter: Meter, num_prompt_tokens: int, num_choices: int, info: EngineInfo
    ) -> int | None:
        """The most that the caller's quota ever lets each choice behind that prompt have."""
        allowance = meter.account.allowance
        return allowance.most_output_tokens(num_prompt_tokens, num_choices, _pool_tokens(info), info.block_size)

    def admit(self, asked: Sequence[tuple[Meter, Request]], info: EngineInfo) -> list[Request]:
        """Holds what each prompt of one request may need, all or none, and gives each its turn.

        Raises like `enter`.
        """
        if not asked:
            return []
        account = asked[0][0].account
        needs = [
            need_of(len(request.prompt_token_ids), request.params.n, request.params.max_tokens, info.block_size)
            for _, request in asked
        ]
        with _counting_refusals(account):
            holds = [(meter.hold, need) for (meter, _), need in zip(asked, needs, strict=True)]
            account.allowance.hold(holds, _pool_tokens(info))
        account.num_requests += len(asked)
        admitted = []
        for (meter, request), need in zip(asked, needs, strict=True):
            meter.num_prompt_tokens = len(request.prompt_token_ids)
            meter.turn = request.priority, need.num_tokens
            admitted.append(replace(request, priority=self._take_turn(account, *meter.turn)))
        return admitted

    def produced(self, meter: Meter, output: SequenceOutput) -> None:
        if not output.token_ids:
            return
        if not meter.is_computed:
            meter.is_computed = True
            meter.account.computed(meter.num_prompt_tokens, output.num_cached_tokens)
        meter.num_output_tokens += len(output.token_ids)
        meter.account.produced(len(output.token_ids))

    def leave(self, meter: Meter, *, is_callers_doing: bool) -> None:
        """The request ended. A prompt that the engine had counts as used, unless the engine is why it was not."""
        if meter.turn is not None:
            meter.account.turns.give(*meter.turn)
            meter.turn = None
        num_used = meter.num_prompt_tokens + meter.num_output_tokens
        meter.account.allowance.release(meter.hold, num_used if is_callers_doing or meter.is_computed else 0)

    def stepped(self, stats: EngineStats, num_decoded: int) -> None:
        """See `EngineTime.stepped`."""
        self.costs.time.stepped(stats, num_decoded)

    def tick(self, figures: Figures) -> None:
        """Once a second; see `CostMeter.tick`."""
        self.costs.tick(figures, self._clock())

    # What it comes to

    def figures(self) -> dict[str, float | None]:
        """For the stats frames: the joules since the start, the others of the last minute."""
        cost = self.costs.last_minute()
        return {
            "energy_joules_total": self.costs.energy_joules,
            "energy_joules_per_token": cost.joules_per_token,
            "cost_per_million_prompt_tokens": cost.money_per_million_prompt_tokens,
            "cost_per_million_output_tokens": cost.money_per_million_output_tokens,
        }

    def report(self, id: str) -> UsageReport:
        costs = self.costs
        has_box_price, has_kwh_price = costs.has_prices
        return UsageReport(
            id=id,
            callers=[self._usage(account) for account in self.accounts],
            last_minute=costs.last_minute(),
            since_start=costs.since_start(),
            energy_source=costs.energy_source,
            has_box_price=has_box_price,
            has_kwh_price=has_kwh_price,
            idle_joules=costs.idle_joules if costs.energy_source else None,
        )

    def _usage(self, account: Account) -> CallerUsage:
        allowance = account.allowance
        return CallerUsage(
            caller=account.name,
            num_requests=account.num_requests,
            num_in_flight=allowance.num_choices,
            num_tokens_in_flight=allowance.num_tokens,
            refusals=dict(account.refusals),
            last_minute=self.costs.last_minute(account),
            since_start=self.costs.since_start(account),
            max_requests=allowance.limits.max_requests,
            tokens_per_minute=allowance.limits.tokens_per_minute,
            tokens_left=allowance.tokens_left,
            kv_share=allowance.limits.kv_share,
            weight=allowance.limits.weight,
        )

    def _take_turn(self, account: Account, asked: int, num_tokens: int) -> int:
        return account.turns.take(
            asked,
            num_tokens,
            weight=account.allowance.limits.weight,
            tokens_per_s=self.costs.tokens_per_s,
            ageing_s_per_point=self._ageing_s_per_point,
            now_s=self._clock(),
        )


@contextmanager
def _counting_refusals(account: Account) -> Iterator[None]:
    try:
        yield
    except QuotaRefusal as refusal:
        account.refused(refusal.limit)
        raise


def _pool_tokens(info: EngineInfo) -> int:
    return info.num_blocks * info.block_size
