"""Copy or compute: what was measured decides, and what was measured once does not decide for ever."""

import math

from pagedd.engine.kv.copy_costs import CopyCosts, RunningAverage


def test_an_average_follows_what_is_measured_now() -> None:
    average = RunningAverage()
    assert average.each is None
    average.note(10, 1.0)
    assert average.each == 0.1
    for _ in range(30):
        average.note(10, 5.0)
    assert abs(average.each - 0.5) < 0.01
    assert (average.total, average.total_s) == (310, 151.0)


def test_what_was_never_measured_is_worth_a_try() -> None:
    costs = CopyCosts(block_size=4)
    assert costs.max_saves() == math.inf
    assert costs.max_loads(from_disk=True) == math.inf
    costs.load.note(1, 9.0)
    assert costs.max_loads(from_disk=False) == math.inf


def test_a_block_is_loaded_when_that_takes_no_longer_than_computing_its_tokens() -> None:
    costs = CopyCosts(block_size=4)
    costs.compute.note(1, 0.25)  # a block: 1 s
    costs.load.note(1, 0.9)
    assert costs.max_loads(from_disk=False) == math.inf
    costs.read.note(1, 0.2)
    assert costs.max_loads(from_disk=True) == 0


def test_saving_has_to_pay_for_loading_as_well() -> None:
    costs = CopyCosts(block_size=4)
    costs.compute.note(1, 0.25)
    costs.save.note(1, 0.6)
    costs.load.note(1, 0.6)
    assert costs.max_loads(from_disk=False) == math.inf
    assert costs.max_saves() == 0


def test_after_some_refusals_one_block_is_tried_and_what_it_took_decides() -> None:
    costs = CopyCosts(block_size=4)
    costs.compute.note(1, 0.25)
    costs.load.note(100, 400.0)
    answers = [costs.max_loads(from_disk=False) for _ in range(100)]
    num_refusals = answers.count(0)
    assert 10 < num_refusals < 100
    assert answers[num_refusals:] == [1] * (100 - num_refusals)
    costs.load.note(1, 4.0)
    assert costs.max_loads(from_disk=False) == 0
    costs.load.note(1, 0.5)
    assert costs.max_loads(from_disk=False) == math.inf


def test_saves_are_few_until_a_load_has_been_measured_anew_as_well() -> None:
    costs = CopyCosts(block_size=4)
    costs.compute.note(1, 0.25)
    costs.load.note(1, 1.5)
    costs.save.note(1, 0.1)
    answers = []
    for _ in range(100):
        answers.append(costs.max_saves())
        if answers[-1]:
            costs.save.note(1, 0.1)
    assert set(answers) == {0, 1}
    costs.load.note(1, 0.5)
    assert costs.max_saves() == math.inf
