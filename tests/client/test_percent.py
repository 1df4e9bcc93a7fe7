"""A share as a percentage."""

import pytest

from pagedd.client.percent import percent


@pytest.mark.parametrize(
    ("ratio", "whole", "tenths"),
    [
        (0.0, "0", "0.0"),
        (0.0004, "<1", "<0.1"),
        (0.004, "<1", "0.4"),
        (0.005, "1", "0.5"),
        (0.125, "13", "12.5"),
        (0.3349, "33", "33.5"),
        (0.666, "67", "66.6"),
        (0.996, ">99", "99.6"),
        (0.99999, ">99", ">99.9"),
        (1.0, "100", "100.0"),
        (1.5, "150", "150.0"),
    ],
)
def test_it_is_rounded_and_only_nothing_is_0_and_only_all_is_100(ratio: float, whole: str, tenths: str) -> None:
    assert (percent(ratio), percent(ratio, decimals=1)) == (whole, tenths)
