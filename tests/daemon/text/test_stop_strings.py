"""Stop strings: nothing of one is ever sent, and the cut into pieces makes no difference."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedd.daemon.text.stop_strings import StopMatcher


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    """What is sent for each piece and at the end, and the stop string that ended it."""
    matcher = StopMatcher(stops)
    sent, matched = [], None
    for piece in pieces:
        emit, matched = matcher.push(piece)
        sent.append(emit)
        if matched is not None:
            return sent, matched
    return [*sent, matcher.finish()], None


def test_nothing_of_a_stop_string_leaks_while_it_arrives_in_pieces() -> None:
    assert run(["DEFGHIJ"], ["DEF", "G", "HI", "J"]) == (["", "", "", ""], "DEFGHIJ")
    assert run(["DEFGHIJ"], ["ABC", "DEF", "GHI", "X"]) == (["ABC", "", "", "DEFGHIX", ""], None)


def test_text_that_only_resembles_a_stop_string_is_sent_once() -> None:
    assert run(["\n", "Alice:"], [" Alice", "!"]) == ([" ", "Alice!", ""], None)


def test_what_was_held_back_is_sent_when_the_text_ends() -> None:
    assert run(["assistant"], ["ple", "as"]) == (["ple", "", "as"], None)


def test_text_before_a_stop_string_in_the_same_piece_is_sent_and_text_after_it_is_not() -> None:
    assert run(["stop"], ["one stop two stop"]) == (["one "], "stop")
    matcher = StopMatcher(["stop"])
    matcher.push("stop")
    assert matcher.push("more") == ("", "stop")
    assert matcher.finish() == ""


def test_the_stop_string_that_is_complete_first_wins_and_of_those_the_longest() -> None:
    assert run(["abcde", "bcd"], ["xabcde"]) == (["xa"], "bcd")
    assert run(["cd", "abcd"], ["xabcd"]) == (["x"], "abcd")


def test_a_stop_string_that_overlaps_itself_is_found_at_its_first_place() -> None:
    assert run(["aab"], ["aa", "a", "b"]) == (["", "a", ""], "aab")
    assert run(["abab"], ["abaabab"]) == (["aba"], "abab")


def test_without_stop_strings_text_passes_through() -> None:
    assert run([], ["a", "b"]) == (["a", "b", ""], None)


def test_an_empty_stop_string_is_misuse() -> None:
    with pytest.raises(ValueError, match="at least one character"):
        StopMatcher(["a", ""])


def whole_string_reference(stops: list[str], text: str) -> tuple[str, str | None]:
    """By definition: the first end of a stop string, the longest there."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            longest = max(ended, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    pieces=st.lists(st.text("abc", max_size=6), max_size=8),
)
def test_any_cut_into_pieces_gives_what_the_whole_string_gives(stops: list[str], pieces: list[str]) -> None:
    sent, matched = run(stops, pieces)
    assert ("".join(sent), matched) == whole_string_reference(stops, "".join(pieces))


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    pieces=st.lists(st.text("abc", max_size=6), max_size=8),
)
def test_only_what_may_begin_a_stop_string_is_held_back(stops: list[str], pieces: list[str]) -> None:
    matcher = StopMatcher(stops)
    received = sent = ""
    for piece in pieces:
        emit, matched = matcher.push(piece)
        if matched is not None:
            return
        received, sent = received + piece, sent + emit
        held = received[len(sent) :]
        assert received.startswith(sent)
        assert held == "" or any(stop.startswith(held) for stop in stops)
