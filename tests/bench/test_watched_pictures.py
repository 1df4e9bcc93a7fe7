"""What a picture costs: tokens that did not come after it, and processor time with and without one."""

import pytest

from pagedd.bench.watched_pictures import Moment, Picture, picture_row, pictures_of


def tokens(pauses: dict[float, float], until_s: float) -> list[float]:
    """A token each 4 ms, but for pauses: after when, and how long."""
    times, now_s = [], 0.0
    while now_s < until_s:
        now_s += 0.004
        for at_s in [at_s for at_s in pauses if at_s < now_s]:
            now_s += pauses.pop(at_s)
        times.append(now_s)
    return times


def moment(asked_s: float, spent: float, others: float = 0.0) -> Moment:
    """Of a pagetop that takes 5 ms for a picture and nothing else."""
    return Moment(asked_s, (asked_s - 0.15, asked_s + 0.15), (spent, spent + 0.005), others)


def test_what_did_not_come_after_a_picture_is_its_cost_and_what_did_not_come_later_is_not() -> None:
    came_s = tokens({1.01: 0.010, 1.15: 0.030, 2.02: 0.014}, until_s=4.0)
    found = pictures_of([moment(1.0, 0.0), moment(2.0, 0.005), moment(3.0, 0.010)], came_s)
    assert [picture.lost_s for picture in found] == pytest.approx([0.010, 0.014], abs=2e-4)
    assert [picture.step_s for picture in found] == pytest.approx([0.004, 0.004], abs=1e-4)
    assert [picture.pagetops_s for picture in found] == pytest.approx([0.005, 0.005])
    assert [picture.between for picture in found] == pytest.approx([0.0, 0.0])


def test_processor_time_between_pictures_is_a_share_of_the_time_between() -> None:
    came_s = tokens({}, until_s=3.0)
    (found,) = pictures_of([moment(1.0, 0.0), moment(2.0, 0.005 + 0.007)], came_s)
    assert found.between == pytest.approx(0.01)


def test_a_picture_at_either_end_of_the_answers_does_not_count() -> None:
    came_s = tokens({}, until_s=1.0)
    assert pictures_of([moment(0.05, 0.0), moment(0.9, 0.0), moment(2.0, 0.0)], came_s) == []
    assert pictures_of([moment(0.5, 0.0), moment(0.6, 0.0)], []) == []


def test_pictures_beside_somebody_elses_work_do_not_count() -> None:
    came_s = tokens({1.01: 0.010, 2.02: 0.014}, until_s=4.0)
    found = pictures_of([moment(1.0, 0.0, others=0.4), moment(2.0, 0.005, others=0.1), moment(3.0, 0.010)], came_s)
    assert [picture.lost_s for picture in found] == pytest.approx([0.014], abs=2e-4)


def test_the_share_is_that_of_a_picture_in_two_seconds() -> None:
    row = picture_row([Picture(lost_s=0.010, step_s=0.004, pagetops_s=0.006, between=0.001)] * 3)
    assert [row[name] for name in ("lost ms", "lost %", "from %", "to %")] == pytest.approx([10.0, 0.5, 0.5, 0.5])
    assert [row[name] for name in ("step ms", "pagetops ms", "between %")] == pytest.approx([4.0, 6.0, 0.1])
