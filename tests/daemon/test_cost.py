"""Energy and money of tokens, in numbers small enough to follow. A second of work takes 100 J, or what a test says."""

import pytest

from pagedd.daemon.accounts import Account, Accounts
from pagedd.daemon.caller import Caller
from pagedd.daemon.cost import CostMeter
from pagedd.daemon.cost_config import CostConfig
from pagedd.daemon.quota_config import QuotaConfig

ANA, BOB = Caller(uid=1001), Caller(uid=1002)
# A box whose price is 1 a second of its life, and power whose price is 1 a J.
PRICES = CostConfig(watts=100.0, box_price=365.25 * 86400, box_life_years=1.0, kwh_price=3.6e6)


class Box:
    """A cost meter and the clock, accounts and engine around it."""

    def __init__(self, config: CostConfig) -> None:
        self.accounts = Accounts(QuotaConfig())
        self.meter = CostMeter(config, self.accounts, 0.0)
        self.now_s = 0.0

    def account(self, caller: Caller) -> Account:
        account = self.accounts.of(caller)
        account.num_requests = 1
        return account

    def second(self, prompt_s: float = 0.0, output_s: float = 0.0, **figures: float) -> None:
        self.meter.time.prompt_s += prompt_s
        self.meter.time.output_s += output_s
        self.now_s += 1.0
        self.meter.tick({**figures}, self.now_s)


def test_prompt_and_output_share_by_the_engine_s_seconds_for_each() -> None:
    box = Box(CostConfig(watts=100.0))
    ana = box.account(ANA)
    ana.computed(30, 0)
    ana.produced(10)
    box.second(prompt_s=0.25, output_s=0.75)
    cost = box.meter.since_start()
    assert cost.joules == pytest.approx(100.0)
    assert cost.joules_per_token == pytest.approx(100 / 40)
    assert cost.joules_per_prompt_token == pytest.approx(25 / 30)
    assert cost.joules_per_output_token == pytest.approx(75 / 10)


def test_cached_prompt_tokens_cost_nothing_to_whoever_finds_them() -> None:
    box = Box(CostConfig(watts=100.0))
    ana, bob = box.account(ANA), box.account(BOB)
    ana.computed(40, 0)
    bob.computed(40, 30)
    ana.produced(5)
    bob.produced(5)
    box.second(prompt_s=0.5, output_s=0.5)
    of_ana, of_bob = (box.meter.since_start(account) for account in (ana, bob))
    assert of_ana.joules == pytest.approx(50 * 40 / 50 + 25)
    assert of_bob.joules == pytest.approx(50 * 10 / 50 + 25)
    assert of_bob.joules_per_prompt_token == pytest.approx(10 / 40)
    assert of_ana.joules_per_prompt_token == pytest.approx(40 / 40)


def test_a_second_s_energy_is_the_work_s_by_its_share_and_the_rest_is_nobody_s() -> None:
    box = Box(CostConfig(watts=100.0))
    box.account(ANA).produced(10)
    box.second(output_s=0.25)
    box.second()
    assert box.meter.since_start().joules == pytest.approx(25.0)
    assert box.meter.idle_joules == pytest.approx(175.0)
    assert box.meter.energy_joules == pytest.approx(200.0)


def test_the_energy_of_a_long_prompt_waits_for_its_first_token() -> None:
    box = Box(CostConfig(watts=100.0))
    ana, bob = box.account(ANA), box.account(BOB)
    box.second(prompt_s=1.0)
    box.second(prompt_s=1.0)
    assert box.meter.since_start().joules == 0.0
    ana.computed(100, 0)
    ana.produced(1)
    box.second(prompt_s=1.0)
    assert box.meter.since_start(ana).joules == pytest.approx(300.0)
    assert box.meter.since_start(bob).joules == 0.0


def test_callers_joules_add_up_to_the_work_s() -> None:
    box = Box(CostConfig(watts=100.0))
    for second, caller in enumerate((ANA, BOB, ANA, BOB, BOB)):
        box.account(caller).computed(10 * second, second)
        box.account(caller).produced(second + 1)
        box.second(prompt_s=0.3, output_s=0.2)
    parts = [box.meter.since_start(account).joules or 0.0 for account in box.accounts]
    assert sum(parts) == pytest.approx(250.0) == pytest.approx(box.meter.work_joules)


def test_money_is_the_box_s_life_and_its_power() -> None:
    box = Box(PRICES)
    box.account(ANA).produced(2)
    box.second(output_s=1.0)
    cost = box.meter.since_start()
    assert cost.money == pytest.approx(1.0 + 100.0)
    assert cost.money_per_million_output_tokens == pytest.approx(1e6 * 101 / 2)
    assert cost.money_per_million_prompt_tokens is None


def test_pue_is_on_the_power_alone() -> None:
    box = Box(CostConfig(watts=100.0, pue=1.5, box_price=365.25 * 86400, box_life_years=1.0, kwh_price=3.6e6))
    box.account(ANA).produced(2)
    box.second(output_s=1.0)
    assert box.meter.since_start().money == pytest.approx(1.0 + 150.0)


def test_the_idle_share_is_paid_by_the_tokens_at_the_power_that_was_measured_while_idle() -> None:
    year = 365.25 * 86400
    box = Box(CostConfig(idle_share=0.75, box_price=year, box_life_years=1.0, kwh_price=3.6e6))
    box.second(cpu_energy_joules=0.0)
    box.second(cpu_energy_joules=20.0)  # idle: 10 W over both seconds
    box.account(ANA).produced(2)
    box.second(output_s=1.0, cpu_energy_joules=120.0)
    # A second of work bears three idle ones: 4 of the box's life, 100 J of its own and 3 × 10 J.
    assert box.meter.energy_source == "cpu"
    assert box.meter.since_start().money == pytest.approx(4.0 + 130.0)


def test_without_a_counter_and_a_stated_wattage_there_is_no_number() -> None:
    box = Box(CostConfig(kwh_price=0.3))
    box.account(ANA).produced(2)
    box.second(output_s=1.0)
    cost = box.meter.since_start()
    assert (cost.joules, cost.joules_per_token, cost.money) == (None, None, None)
    assert box.meter.energy_joules is None
    assert box.meter.has_prices == (False, False)


def test_the_box_s_share_is_known_where_energy_is_not() -> None:
    box = Box(CostConfig(box_price=365.25 * 86400, box_life_years=1.0, kwh_price=0.3))
    box.account(ANA).produced(2)
    box.second(output_s=1.0)
    assert box.meter.since_start().money == pytest.approx(1.0)
    assert box.meter.has_prices == (True, False)


def test_live_is_the_last_minute() -> None:
    box = Box(CostConfig(watts=100.0))
    ana = box.account(ANA)
    ana.produced(10)
    box.second(output_s=1.0)
    for _ in range(70):
        box.second()
    assert box.meter.last_minute().joules == 0.0
    assert box.meter.last_minute().joules_per_token is None
    ana.produced(10)
    box.second(output_s=0.5)
    live = box.meter.last_minute(ana)
    assert (live.output_tokens, live.joules) == (10, pytest.approx(50.0))
    assert 55 <= live.seconds <= 65
    assert box.meter.last_minute().joules == live.joules
    assert box.meter.since_start().output_tokens == 20


def test_the_engine_s_speed_is_known_once_it_has_worked() -> None:
    box = Box(CostConfig())
    assert box.meter.tokens_per_s is None
    box.account(ANA).computed(60, 20)
    box.account(ANA).produced(10)
    box.second(prompt_s=0.3, output_s=0.2)
    assert box.meter.tokens_per_s == pytest.approx(100.0)
