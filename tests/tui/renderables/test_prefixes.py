"""The tree of cached prefixes."""

from pagedd.client.questions import PrefixNode
from pagedd.tui.glyphs import UNICODE
from pagedd.tui.line import text_of, width_of
from pagedd.tui.renderables.prefixes import (
    branches,
    evict_lines,
    evict_question,
    evicted_words,
    prefix_header,
    prefix_line,
)


def node(digest: str, parent: str = "", num_blocks: int = 1, **changes: object) -> PrefixNode:
    depth = 0 if not parent else 16
    fields: dict[str, object] = {"depth": depth, "num_tokens": 16 * num_blocks, "text": digest, "user": "ana"}
    return PrefixNode(digest=digest, parent=parent, num_blocks=num_blocks, **(fields | changes))  # type: ignore[arg-type]


def test_children_stand_below_their_parent_the_largest_first() -> None:
    nodes = [node("root"), node("small", "root", 1), node("large", "root", 5), node("other", num_blocks=2)]
    shown = branches(nodes, (), UNICODE)
    assert [(branch.guides, branch.node.digest, branch.num_blocks, branch.num_tokens) for branch in shown] == [
        ("", "root", 7, 112),
        ("├─", "large", 5, 80),
        ("└─", "small", 1, 16),
        ("", "other", 2, 32),
    ]


def test_a_deeper_level_keeps_the_lines_of_those_above() -> None:
    nodes = [
        node("root"),
        node("first", "root", 9),
        node("last", "root", 1),
        node("deep", "first", 1, depth=32),
    ]
    assert [branch.guides for branch in branches(nodes, (), UNICODE)] == ["", "├─", "│ └─", "└─"]


def test_a_folded_branch_hides_what_is_below_and_still_counts_it() -> None:
    nodes = [node("root"), node("child", "root", 4)]
    (shown,) = branches(nodes, {"root"}, UNICODE)
    assert (shown.is_folded, shown.num_blocks) == (True, 5)


def test_a_node_whose_parent_was_left_out_stands_at_the_top() -> None:
    assert [branch.guides for branch in branches([node("lost", "gone")], (), UNICODE)] == [""]


def test_a_thousand_levels_are_no_trouble() -> None:
    nodes = [node(f"n{level}", f"n{level - 1}" if level else "", depth=16 * level) for level in range(3000)]
    shown = branches(nodes, (), UNICODE)
    assert len(shown) == 3000
    assert width_of(prefix_line(shown[-1], 4096, 100, UNICODE)) == 100


def test_a_line_says_what_it_holds_of_the_pool() -> None:
    (branch,) = branches([node("root", num_blocks=41, num_hits=7, age_s=0.4, text="You are")], (), UNICODE)
    assert text_of(prefix_header(110)) == (
        "first words                                               tokens  blocks     pool    hits        age  who     "
    )
    assert text_of(prefix_line(branch, 4096, 110, UNICODE)) == (
        "  You are                                                    656      41    1.0 %       7      0.4 s  ana     "
    )


def test_a_narrow_screen_is_for_the_words() -> None:
    (branch,) = branches(
        [node("root", num_blocks=41, num_hits=7, age_s=0.4, text="You are the assistant" * 9)], (), UNICODE
    )
    line = text_of(prefix_line(branch, 4096, 76, UNICODE))
    assert line.endswith("…      656    1.0 %       7")
    assert len(line.partition("…")[0]) >= 48


def test_who_may_not_see_the_text_sees_a_digest() -> None:
    (branch,) = branches([node("9f3ac01b22d4", text=None)], (), UNICODE)
    assert "9f3ac01b…" in text_of(prefix_line(branch, 4096, 60, UNICODE))


def test_siblings_that_begin_alike_are_told_apart_where_they_differ() -> None:
    texts = {
        "a": "user: Do you have something for a ten-year-old",
        "b": "user: Do you have anything about whales",
        "c": "user: Why does my laptop forget",
        "d": "You are the assistant",
    }
    shown = branches([node(digest, text=text) for digest, text in texts.items()], (), UNICODE)
    common = {branch.node.digest: texts[branch.node.digest][: branch.num_common] for branch in shown}
    assert common == {"a": "user: Do you have ", "b": "user: Do you have ", "c": "user: ", "d": ""}
    # 48 cells leave 29 for the words.
    lines = {branch.node.digest: text_of(prefix_line(branch, 4096, 48, UNICODE))[2:31] for branch in shown}
    assert lines == {
        "a": "user: Do you…something for a…",
        "b": "user: Do you…anything about …",
        "c": "user: Why does my laptop for…",
        "d": "You are the assistant        ",
    }


def test_two_callers_with_the_same_words_have_nothing_that_differs() -> None:
    shown = branches([node("a", text="You are", user="ana"), node("b", text="You are", user="noor")], (), UNICODE)
    assert [branch.num_common for branch in shown] == [0, 0]


def test_evicting_says_how_many_blocks() -> None:
    (branch,) = branches([node("root", num_blocks=1, state="mixed")], (), UNICODE)
    assert evict_question(branch) == "Evict 1 block: this prefix?"
    assert "stays" in text_of(evict_lines(branch, UNICODE)[-1])
    assert evicted_words(23, 0) == "23 blocks evicted"
    assert evicted_words(1, 0, 2) == "1 block evicted; 2 blocks stay on the disk"
    assert evicted_words(0, 12) == "0 blocks evicted; 12 blocks in use and kept"
