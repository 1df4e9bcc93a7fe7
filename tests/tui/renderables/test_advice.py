"""The first piece of advice stands in the cache's border; the rest is counted."""

from pagedd.client.stats_frame import Advice
from pagedd.tui.renderables.advice import advice_words
from pagedd.tui.state import State

from ..conftest import played


def test_the_first_finding_is_told_and_the_others_are_counted() -> None:
    state = played(1)
    assert state.frame is not None
    assert advice_words(state) == ""
    state.frame.advice = [
        Advice(cause="fragmentation", finding="12 % [b]lost", change="--block-size 8", gain="room"),
        Advice(cause="idle_blocks", finding="waits", change="--max-num-seqs 64", gain="more"),
    ]
    assert advice_words(state) == r"pagectl doctor, 1 of 2: 12 % \[b]lost"
    del state.frame.advice[1]
    assert advice_words(state) == r"pagectl doctor: 12 % \[b]lost"


def test_before_the_first_frame_there_is_none() -> None:
    assert advice_words(State()) == ""
