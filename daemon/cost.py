"""What a token costs: every figure about energy and money, defined once, in words.

* **Energy** is what the counters of the GPU and of the processor's packages tell, or the stated wattage where there is
  none; never a guess. It is read once a second (`energy.py`).
* The engine **works** while it is in a step. A second's energy is the work's and the idle time's by their shares of the
  second. Idle joules are nobody's; they are shown apart.
* **Prompt and output** share the work's joules and seconds by what their tokens take: seconds of the engine for a
  computed prompt token and for an output token, as measured since the start (`engine_time.py`). A cached prompt token
  takes none. **Callers** share them in the same way, by their tokens of the moment.
* **Joules per token** = the work's joules / (prompt tokens, cached ones too, + output tokens). Per prompt and per
  output token: the joules of that kind / its tokens. So cached tokens lower the price of a prompt token.
* **Money** of some work = [seconds × box_price / box_life_years + kwh_price × PUE ×
  ((1 − idle_share) × joules + idle_share × idle watts × seconds)] / (1 − idle_share): what the box costs in its whole
  life, idle or not, is paid by the tokens of the time that it works. *Idle watts* are the mean of what was measured
  while idle; 0 as long as it never was. What has no price is left out, and that is said.
* **Live** is the last minute, give or take five seconds.
"""

from collections import deque
from dataclasses import dataclass, field

from pagedd.client.usage import Cost
from pagedd.daemon.accounts import OTHERS, Account, Accounts, Spent
from pagedd.daemon.cost_config import CostConfig
from pagedd.daemon.energy import EnergyMeter
from pagedd.daemon.engine_time import EngineTime
from pagedd.daemon.telemetry import Figures

LIVE_S = 60.0
_MARK_INTERVAL_S = 5.0
_SECONDS_A_YEAR = 365.25 * 86400
_JOULES_A_KWH = 3.6e6


@dataclass(frozen=True, slots=True)
class _Mark:
    """What everybody had used at one moment, by tag."""

    at_s: float
    spent: dict[str, Spent] = field(default_factory=dict)


class CostMeter:
    """Shares out what the box uses among the accounts, and puts a price on it.

    Attributes:
        time: the engine's, by kind of token.
        idle_joules, idle_s: the box's without work.
        work_joules: all others, also those of tokens that are still being computed.
    """

    def __init__(self, config: CostConfig, accounts: Accounts, now_s: float) -> None:
        self.time = EngineTime()
        self.idle_joules = self.idle_s = self.work_joules = 0.0
        self._config = config
        self._accounts = accounts
        self._energy = EnergyMeter(config.watts, now_s)
        self._started_s = self._ticked_s = now_s
        self._work_seen_s = 0.0
        # Of work that no token has shown yet: a long prompt takes many steps.
        self._pending_joules = self._pending_s = 0.0
        self._marks = deque([_Mark(now_s)], maxlen=int(LIVE_S / _MARK_INTERVAL_S) + 1)

    @property
    def energy_source(self) -> str:
        return self._energy.source

    @property
    def energy_joules(self) -> float | None:
        """All that the box has used, None when that is not known."""
        return self.work_joules + self.idle_joules if self._energy.source else None

    @property
    def tokens_per_s(self) -> float | None:
        """What the engine computes in a second of its steps; None while nothing has been measured."""
        total = self._total()
        num_tokens = total.computed_tokens + total.output_tokens
        return num_tokens / self.time.total_s if num_tokens and self.time.total_s else None

    @property
    def has_prices(self) -> tuple[bool, bool]:
        """Whether there is one of the box, and one of its power that can be used."""
        return self._config.box_price is not None, self._config.kwh_price is not None and bool(self._energy.source)

    def tick(self, figures: Figures, now_s: float) -> None:
        """Accounts for the time since the last call, about once a second. `figures` are `telemetry.py`'s."""
        elapsed_s, self._ticked_s = now_s - self._ticked_s, now_s
        if elapsed_s <= 0:
            return
        # A step that took long is told at its end, so that it may be more than the time that went by.
        work_s, self._work_seen_s = self.time.total_s - self._work_seen_s, self.time.total_s
        share = min(1.0, work_s / elapsed_s)
        joules = self._energy.advance(figures, now_s)
        self.work_joules += joules * share
        self.idle_joules += joules * (1 - share)
        self.idle_s += elapsed_s * (1 - share)
        self._pending_joules += joules * share
        self._pending_s += work_s
        self._share_out()
        if now_s - self._marks[-1].at_s >= _MARK_INTERVAL_S:
            self._marks.append(_Mark(now_s, {account.tag: account.spent.copy() for account in self._accounts}))

    def since_start(self, account: Account | None = None) -> Cost:
        """Of one caller, or of all."""
        spent = account.spent if account is not None else self._total()
        return self._cost(spent, self._ticked_s - self._started_s)

    def last_minute(self, account: Account | None = None) -> Cost:
        """Of one caller, or of all."""
        mark = self._marks[0]
        if account is None:
            earlier = Spent()
            for spent in mark.spent.values():
                earlier.add(spent)
            now = self._total()
        else:
            earlier, now = self._earlier(mark, account), account.spent
        return self._cost(now.since(earlier), self._ticked_s - mark.at_s)

    def _share_out(self) -> None:
        """Gives the pending work to those whose tokens have come since the last time."""
        prompt_s, output_s = self._seconds_per_token()
        shares = [
            (account, account.unshared.computed_tokens * prompt_s, account.unshared.output_tokens * output_s)
            for account in self._accounts
        ]
        total = sum(prompt + output for _, prompt, output in shares)
        if total <= 0:
            return
        for account, prompt, output in shares:
            account.spent.prompt_joules += self._pending_joules * prompt / total
            account.spent.output_joules += self._pending_joules * output / total
            account.spent.prompt_seconds += self._pending_s * prompt / total
            account.spent.output_seconds += self._pending_s * output / total
            account.unshared = Spent()
        self._pending_joules = self._pending_s = 0.0

    def _seconds_per_token(self) -> tuple[float, float]:
        """Of a computed prompt token and of an output token; as if equal while nothing has been measured."""
        total = self._total()
        if not (self.time.total_s and total.computed_tokens and total.output_tokens):
            return 1.0, 1.0
        return self.time.prompt_s / total.computed_tokens, self.time.output_s / total.output_tokens

    def _total(self) -> Spent:
        total = Spent()
        for account in self._accounts:
            total.add(account.spent)
        return total

    def _earlier(self, mark: _Mark, account: Account) -> Spent:
        """What an account had used by then, with that of those whose accounts it has taken over since."""
        earlier = mark.spent.get(account.tag, Spent()).copy()
        if account.tag == OTHERS:
            present = {other.tag for other in self._accounts}
            for tag, spent in mark.spent.items():
                if tag not in present:
                    earlier.add(spent)
        return earlier

    def _cost(self, spent: Spent, seconds: float) -> Cost:
        prompt_joules, output_joules = spent.prompt_joules, spent.output_joules
        num_tokens = spent.prompt_tokens + spent.output_tokens
        cost = Cost(
            seconds=seconds,
            prompt_tokens=spent.prompt_tokens,
            cached_tokens=spent.cached_tokens,
            output_tokens=spent.output_tokens,
        )
        if self._energy.source:
            cost.joules = prompt_joules + output_joules
            cost.joules_per_token = _per(cost.joules, num_tokens)
            cost.joules_per_prompt_token = _per(prompt_joules, spent.prompt_tokens)
            cost.joules_per_output_token = _per(output_joules, spent.output_tokens)
        if any(self.has_prices):
            prompt_money = self._money(prompt_joules, spent.prompt_seconds)
            output_money = self._money(output_joules, spent.output_seconds)
            cost.money = prompt_money + output_money
            cost.money_per_million_prompt_tokens = _per(1e6 * prompt_money, spent.prompt_tokens)
            cost.money_per_million_output_tokens = _per(1e6 * output_money, spent.output_tokens)
        return cost

    def _money(self, joules: float, seconds: float) -> float:
        config, idle_share = self._config, self._config.idle_share
        idle_watts = self.idle_joules / self.idle_s if self.idle_s else 0.0
        box = (config.box_price or 0.0) * seconds / (config.box_life_years * _SECONDS_A_YEAR)
        drawn_joules = ((1 - idle_share) * joules + idle_share * idle_watts * seconds) * config.pue
        return (box + (config.kwh_price or 0.0) * drawn_joules / _JOULES_A_KWH) / (1 - idle_share)


def _per(amount: float, number: int) -> float | None:
    return amount / number if number else None
