"""Numbers keep their width, say their unit, and never show 0 for what is not known."""

import pytest

from pagedd.tui.renderables import numbers


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "    –"), (0, "    0"), (7.4, "    7"), (999.6, "1 000"), (1284, "1 284"), (1_234_567, "1 234 567")],
)
def test_a_count_has_its_thousands_apart(value: float | None, text: str) -> None:
    assert numbers.count(value, 5) == text


@pytest.mark.parametrize(
    ("ratio", "text"), [(None, "    – %"), (0.0, "  0.0 %"), (0.6123, " 61.2 %"), (1.0, "100.0 %"), (0.0001, " <0.1 %")]
)
def test_a_ratio_is_a_percentage_in_seven_cells(ratio: float | None, text: str) -> None:
    assert numbers.percent(ratio) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "    – ms"),
        (0.0004, "  0.4 ms"),
        (0.0842, " 84.2 ms"),
        (0.1, "  100 ms"),
        (1.2041, "1 204 ms"),
        (9.9996, "10 000 ms"),
        (84.0, "   84 s "),
    ],
)
def test_a_latency_is_in_milliseconds_up_to_ten_seconds(seconds: float | None, text: str) -> None:
    assert numbers.milliseconds(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "–"), (2.94, "2.9 s"), (59.94, "59.9 s"), (247, "4:07"), (3723, "1:02:03"), (274320, "3d 04:12")],
)
def test_a_time_span_is_read_at_a_glance(seconds: float | None, text: str) -> None:
    assert numbers.duration(seconds) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (None, "    –    "),
        (0, "    0 B  "),
        (1000, "  1.0 KiB"),
        (6.1 * 2**30, "  6.1 GiB"),
        (812 * 2**20, "  812 MiB"),
    ],
)
def test_bytes_are_in_nine_cells(num_bytes: float | None, text: str) -> None:
    assert numbers.size(num_bytes) == text


@pytest.mark.parametrize(
    ("value", "bound"), [(0, 1), (1, 1), (1.1, 2), (3, 5), (5.1, 10), (207, 500), (1284, 2000), (99_000, 100_000)]
)
def test_a_graphs_bound_is_a_round_number(value: float, bound: float) -> None:
    assert numbers.rounded_maximum(value) == bound
