"""A block in words: as many facts as fit whole, then its text."""

from pagedd.client.questions import BlockDetail
from pagedd.tui.glyphs import UNICODE
from pagedd.tui.line import text_of
from pagedd.tui.pool import OWNED
from pagedd.tui.renderables.block_line import block_line, block_text

from ..conftest import played

DETAIL = BlockDetail(id="", index=0, state="used", digest="9f3ac01b22", last_use_s=0.1, text="the quick\nbrown fox")


def test_facts_of_a_block_are_whole_or_left_out() -> None:
    state = played(40)
    block = next(block for block, look in enumerate(state.pool.looks) if look >= OWNED)
    whole = text_of(block_line(state, block, DETAIL, 200, UNICODE))
    assert whole.endswith(" · 16/16 slots · hash 9f3ac01b… · last use 0.1 s ago")
    facts = whole.split(" · ")
    for width in range(len(facts[0]), 120):
        shown = text_of(block_line(state, block, DETAIL, width, UNICODE))
        assert len(shown) <= width
        assert shown.split(" · ") == facts[: shown.count(" · ") + 1]


def test_the_text_of_a_block_ends_in_an_ellipsis_and_is_left_out_where_it_says_nothing() -> None:
    assert text_of(block_text(DETAIL, 80, UNICODE)) == "tokens the quick⏎brown fox"
    assert text_of(block_text(DETAIL, 20, UNICODE)) == "tokens the quick⏎br…"
    assert text_of(block_text(DETAIL, 14, UNICODE)) == ""
    assert text_of(block_text(None, 80, UNICODE)) == ""
