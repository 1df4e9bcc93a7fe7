"""Pages of blocks that are not full: who has which, and when it is free again."""

import pytest

from pagedd.engine.errors import IntegrityError
from pagedd.engine.kv.open_pages import OpenPages, num_pages_for


def test_a_block_keeps_its_page_until_it_was_closed_and_that_is_settled() -> None:
    pages = OpenPages(2)
    page = pages.open(7)
    assert pages.open(7) == page == pages.find(7)
    pages.close(7)
    assert pages.find(7) == page  # a copy of it may still be made
    pages.settle()
    assert pages.find(7) is None
    assert pages.num_used == 0


def test_a_block_that_is_taken_again_before_its_page_is_free_keeps_it() -> None:
    pages = OpenPages(1)
    page = pages.open(7)
    pages.close(7)
    assert pages.open(7) == page
    pages.settle()
    assert pages.find(7) == page


def test_closing_what_is_not_open_is_nothing() -> None:
    pages = OpenPages(1)
    pages.close(3)
    pages.settle()
    assert pages.num_used == 0


def test_more_open_blocks_than_pages_are_an_alarm() -> None:
    pages = OpenPages(1)
    pages.open(0)
    with pytest.raises(IntegrityError, match="all 1 pages of open blocks are taken"):
        pages.open(1)


def test_pages_are_as_many_as_steps_can_touch_and_refused_guesses_leave() -> None:
    assert num_pages_for(64, 16, 2, num_guesses=0, runs_ahead=False) == 4 + 2 * 2
    assert num_pages_for(64, 16, 2, num_guesses=7, runs_ahead=False) == 4 + 3 * 2
    assert num_pages_for(64, 16, 2, num_guesses=0, runs_ahead=True) == 8 + 4 * 2
