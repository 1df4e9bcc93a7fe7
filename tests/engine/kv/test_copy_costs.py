"""Copy or compute: what was measured decides, and what was measured once does not decide for ever."""

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
    assert costs.is_worth_saving()
    assert costs.is_worth_loading(from_disk=True)
    costs.load.note(1, 9.0)
    assert costs.is_worth_loading(from_disk=False)


def test_a_block_is_loaded_when_that_takes_no_longer_than_computing_its_tokens() -> None:
    costs = CopyCosts(block_size=4)
    costs.compute.note(1, 0.25)  # a block: 1 s
    costs.load.note(1, 0.9)
    assert costs.is_worth_loading(from_disk=False)
    costs.read.note(1, 0.2)
    assert not costs.is_worth_loading(from_disk=True)


def test_saving_has_to_pay_for_loading_as_well() -> None:
    costs = CopyCosts(block_size=4)
    costs.compute.note(1, 0.25)
    costs.save.note(1, 0.6)
    costs.load.note(1, 0.6)
    assert costs.is_worth_loading(from_disk=False)
    assert not costs.is_worth_saving()


def test_after_some_refusals_it_is_tried_again() -> None:
    costs = CopyCosts(block_size=4)
    costs.compute.note(1, 0.25)
    costs.load.note(1, 4.0)
    num_refusals = next(i for i in range(1000) if costs.is_worth_loading(from_disk=False))
    assert 10 < num_refusals < 1000
