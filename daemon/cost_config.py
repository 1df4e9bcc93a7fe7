"""The settings of `[cost]`: what the box and its power cost. `cost.py` says in words what becomes of them."""

from dataclasses import dataclass

from pagedd.daemon.setting import setting

_MAX_PRICE = 10**12


@dataclass(frozen=True, slots=True, kw_only=True)
class CostConfig:
    """Prices are in any one currency. None is not stated, and what needs it is not shown."""

    box_price: float | None = setting(
        None, "Price of the box; its share is in the cost of a token.", minimum=0, maximum=_MAX_PRICE, none="unknown"
    )
    box_life_years: float = setting(4.0, "Years over which the box is paid for.", minimum=0.01, maximum=100)
    kwh_price: float | None = setting(
        None, "Price of a kWh, in the same currency.", minimum=0, maximum=_MAX_PRICE, none="unknown"
    )
    pue: float = setting(
        1.0,
        "Energy that the site draws for each unit that the box does, with cooling and losses.",
        minimum=1,
        maximum=5,
    )
    idle_share: float = setting(
        0.0, "Share of its life that the box is on without work, which its tokens pay.", minimum=0, maximum=0.99
    )
    watts: float | None = setting(
        None, "Power of the box, used where nothing can be measured.", above=0, maximum=1_000_000, none="unknown"
    )
