"""Who goes first."""

from types import SimpleNamespace

import pytest

from pagedd.engine.policy import WaitingQueue, due_s


def sequence(due: float, order: int):
    return SimpleNamespace(due_s=due, order=order)


def test_a_point_of_priority_is_worth_some_seconds_of_waiting() -> None:
    assert due_s(10.0, 0, 0.5) == 10.0
    assert due_s(10.0, 20, 0.5) == 0.0
    assert due_s(10.0, -20, 0.5) == 20.0


def test_the_most_urgent_comes_first_and_ties_go_to_the_one_that_came_first() -> None:
    queue = WaitingQueue()
    late, early, urgent = sequence(5.0, 1), sequence(5.0, 0), sequence(1.0, 2)
    for waiting in (late, early, urgent):
        queue.push(waiting)
    served = []
    while (head := queue.peek()) is not None:
        queue.remove(head)
        served.append(head)
    assert served == [urgent, early, late]


def test_removal_from_the_middle_and_a_changed_urgency_are_respected() -> None:
    queue = WaitingQueue()
    first, second, third = sequence(1.0, 0), sequence(2.0, 1), sequence(3.0, 2)
    for waiting in (first, second, third):
        queue.push(waiting)
    queue.remove(second)
    third.due_s = 0.0
    queue.push(third)
    assert queue.peek() is third
    assert len(queue) == 2
    assert second not in queue
    with pytest.raises(KeyError):
        queue.remove(second)


def test_changes_of_urgency_leave_nothing_behind_that_grows() -> None:
    queue = WaitingQueue()
    waiting = [sequence(float(order), order) for order in range(3)]
    for one in waiting:
        queue.push(one)
    for change in range(1000):
        waiting[2].due_s = -float(change % 7)
        queue.push(waiting[2])
        assert len(queue._heap) <= 6
        assert queue.peek() is (waiting[2] if change % 7 else waiting[0])
