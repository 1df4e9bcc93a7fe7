"""Usage and costs as text; "not known" is never a number."""

import msgspec
import pytest

from pagedd.client.render import ASCII, UNICODE
from pagedd.client.render_usage import render_cost, render_usage
from pagedd.client.usage import Cost

from .fake_daemon import make_usage


def test_usage_is_a_row_for_each_caller_with_what_is_left() -> None:
    assert render_usage(make_usage(), UNICODE) == [
        "who         requests  live  prompt  cached  output  refused                 left/min     J     money",
        "ana                4   1/2     300     100      60  requests x1, tokens x2   250/600  90.0  0.003000",
        "key laptop         1     0       0       0       0  0                              –     –         –",
    ]


def test_nobody_has_asked_yet() -> None:
    report = msgspec.structs.replace(make_usage(), callers=[])
    assert render_usage(report, ASCII) == ["nobody has asked for anything since the daemon started"]


def test_a_cost_says_what_it_is_made_of() -> None:
    assert render_cost(make_usage(), UNICODE) == [
        "energy: from the wattage that [cost] watts states; nothing was measured",
        "        1000.0 J more were used without work, and are nobody's",
        "money:  the box and its power, in the currency of [cost]",
        "",
        "                               last minute  since start",
        "prompt tokens                            0          300",
        "  of them cached                         0          100",
        "output tokens                            0           60",
        "J                                        –         90.0",
        "J / token                                –       0.2500",
        "J / prompt token                         –       0.1000",
        "J / output token                         –       1.0000",
        "money                                    –     0.003000",
        "money / million prompt tokens            –       1.5000",
        "money / million output tokens            –      12.2500",
        "",
        "who         J, last minute  J / token  J, since start  J / token     money  /M prompt  /M output",
        "ana                   90.0     0.2500            90.0     0.2500  0.003000     1.5000    12.2500",
        "key laptop               –          –               –          –         –          –          –",
    ]


def test_what_is_more_than_nothing_never_reads_as_nothing() -> None:
    cost = Cost(seconds=60.0, output_tokens=5, joules=0.0, joules_per_token=0.0499, money=4.2e-9)
    lines = render_cost(msgspec.structs.replace(make_usage(), callers=[], since_start=cost), ASCII)
    shown = {line.rsplit(maxsplit=2)[0]: line.split()[-1] for line in lines[5:]}
    assert (shown["J"], shown["J / token"], shown["money"]) == ("0.0", "0.0499", "4.2e-09")


@pytest.mark.parametrize(
    ("money", "shown"),
    [
        (1.25, "1.25000"),
        (1234.5678, "1234.57"),
        (87654321.9, "87654322"),
        (1522562806832936960.0, "1.52256e+18"),
    ],
)
def test_no_price_makes_more_digits_than_can_be_read(money: float, shown: str) -> None:
    cost = Cost(seconds=60.0, output_tokens=123_456_789_012, money=money)
    lines = render_cost(msgspec.structs.replace(make_usage(), callers=[], since_start=cost), ASCII)
    [line] = [line for line in lines if line.startswith("money  ")]
    assert line.split()[-1] == shown
    [tokens] = [line for line in lines if line.startswith("output tokens")]
    assert tokens.split()[-1] == "123456789012"


def test_what_is_not_known_is_said_with_the_setting_that_it_needs() -> None:
    cost = Cost(seconds=60.0, output_tokens=5)
    nothing = msgspec.structs.replace(
        make_usage(),
        callers=[],
        last_minute=cost,
        since_start=cost,
        energy_source="",
        idle_joules=None,
        has_box_price=False,
        has_kwh_price=False,
    )
    lines = render_cost(nothing, ASCII)
    assert lines[0].startswith("energy: not known: no counter")
    assert "[cost] watts" in lines[0]
    assert lines[1] == "money:  not known: state [cost] box_price, and kwh_price where energy is known"
    assert [line.split()[-2:] for line in lines if line.startswith(("J", "money /"))] == [["-", "-"]] * 6
    alone = msgspec.structs.replace(nothing, has_box_price=True)
    assert render_cost(alone, ASCII)[1].startswith("money:  the box alone; the rest needs [cost] kwh_price")
