"""The table of requests: what fits, what matches, in which order, and what a row says."""

from pagedd.client.stats_frame import RequestRow
from pagedd.tui.glyphs import ASCII, UNICODE
from pagedd.tui.letters import Mark
from pagedd.tui.line import text_of, width_of
from pagedd.tui.renderables.requests import (
    about_lines,
    arranged,
    columns_for,
    header_line,
    models_differ,
    request_line,
    sort_of,
)
from pagedd.tui.state import Sequence


def row(request_id: str, **changes: object) -> RequestRow:
    fields: dict[str, object] = {
        "index": 0,
        "user": "ana",
        "state": "decode",
        "priority": 0,
        "num_prompt_tokens": 212,
        "num_cached_tokens": 192,
        "num_computed_tokens": 330,
        "num_output_tokens": 118,
        "num_blocks": 21,
        "num_preemptions": 0,
        "age_s": 2.9,
        "first_token_s": 0.062,
        "preview": "Explain paged attention",
    }
    return RequestRow(request_id=request_id, **(fields | changes))  # type: ignore[arg-type]


def test_a_row_says_everything_when_there_is_room() -> None:
    sequence = Sequence(row("7f31c0ffee"), Mark(1), tokens_per_s=41.23)
    assert text_of(request_line(sequence, 120, UNICODE)) == (
        "a  7f31c0ff  ana          0  decode          212     192    118      21   41.2   62.0 ms    2.9 s"
        "  “Explain paged atten…"
    )


def test_a_narrow_screen_keeps_who_and_how_far() -> None:
    sequence = Sequence(row("7f31c0ffee"), Mark(1), tokens_per_s=41.23)
    assert [column.name for column in columns_for(38)] == ["id", "state", "out"]
    assert text_of(request_line(sequence, 38, UNICODE)) == "a  7f31c0ff  decode         118       "


def test_every_line_is_as_wide_as_the_screen() -> None:
    sequence = Sequence(row("7f31c0ffee", preview="世" * 40), Mark(1))
    for width in range(30, 200):
        assert width_of(request_line(sequence, width, UNICODE)) == width


def test_one_that_waits_has_no_letter_and_no_numbers_that_it_cannot_have() -> None:
    waiting = row("80c9", state="waiting", num_blocks=0, num_output_tokens=0, first_token_s=None, preview="")
    assert text_of(request_line(Sequence(waiting, tokens_per_s=0.0), 119, UNICODE)).rstrip() == (
        "·  80c9      ana          0  waiting         212       –      0       0      –      – ms    2.9 s"
    )
    assert text_of(request_line(Sequence(waiting), 60, ASCII)).startswith(".  80c9")


def test_a_prefill_says_how_far_it_is() -> None:
    sequence = Sequence(row("80c2", state="prefill", num_prompt_tokens=4096, num_computed_tokens=1365))
    assert "prefill 33%" in text_of(request_line(sequence, 80, UNICODE))
    for computed, told in ((1, "prefill <1%"), (1378, "prefill 34%"), (4095, "prefill>99%")):
        sequence.row.num_computed_tokens = computed
        assert told in text_of(request_line(sequence, 80, UNICODE))


def test_whoever_acts_on_a_request_is_told_which_it_is() -> None:
    sequence = Sequence(row("7f31c0ffee", max_tokens=300, model="SmolLM2"), Mark(1))
    assert [text_of(line) for line in about_lines(sequence, UNICODE)] == [
        "“Explain paged attention”",
        "decode, 118 tokens of at most 300 so far, prompt 212",
        "SmolLM2 · 7f31c0ffee",
    ]
    sequence.row.preview = ""
    assert len(about_lines(sequence, UNICODE)) == 2, "who may not see the text sees no empty quotes"


def test_a_later_choice_has_its_number() -> None:
    assert text_of(request_line(Sequence(row("7f31c0ffee", index=2)), 80, UNICODE))[3:11] == "7f31c0/2"


def test_every_word_of_a_filter_must_occur() -> None:
    sequences = [
        Sequence(row("a1", user="ana", state="decode")),
        Sequence(row("b2", user="ana", state="waiting")),
        Sequence(row("c3", user="batch", state="waiting", preview="Summarise")),
    ]
    assert [s.row.request_id for s in arranged(sequences, "ANA wait", "age", False)] == ["b2"]
    assert [s.row.request_id for s in arranged(sequences, "summ", "age", False)] == ["c3"]
    assert arranged(sequences, "nobody", "age", False) == []


def test_rows_are_sorted_by_a_column_and_equal_ones_by_age() -> None:
    sequences = [
        Sequence(row("a1", age_s=1.0, num_output_tokens=5)),
        Sequence(row("b2", age_s=3.0, num_output_tokens=5)),
        Sequence(row("c3", age_s=2.0, num_output_tokens=9)),
    ]

    def order(sort: str, is_reversed: bool = False) -> list[str]:
        return [sequence.row.request_id for sequence in arranged(sequences, "", sort, is_reversed)]

    assert order("age") == ["b2", "c3", "a1"]
    assert order("age", is_reversed=True) == ["a1", "c3", "b2"]
    assert order("out") == ["c3", "b2", "a1"]
    assert order("id") == ["a1", "b2", "c3"]


def test_the_header_shows_the_order_and_a_click_on_it_names_the_column() -> None:
    header = text_of(header_line(80, "age", False, UNICODE))
    assert "age▾" not in header, "the column is not in sight at this width"
    header = text_of(header_line(120, "out", True, UNICODE))
    assert "out▴" in header
    assert sort_of(header.index("prompt"), 120) == "prompt"
    assert sort_of(0, 120) is None


def test_a_name_cannot_steer_the_terminal() -> None:
    line = request_line(Sequence(row("7f\x1b[2J", user="\x1b]0;x\x07")), 80, UNICODE)
    assert "\x1b" not in text_of(line)
    assert "\x07" not in text_of(line)


def test_the_model_is_in_the_rows_only_where_they_differ() -> None:
    alike = [Sequence(row("a", model="SmolLM2")), Sequence(row("b", model="SmolLM2"))]
    assert not models_differ(alike)
    assert "SmolLM2" not in text_of(request_line(alike[0], 200, UNICODE))
    assert "model" not in text_of(header_line(200, "age", False, UNICODE))
    differing = [*alike, Sequence(row("c", model="Qwen3"))]
    assert models_differ(differing)
    assert "SmolLM2" in text_of(request_line(alike[0], 200, UNICODE, has_models=True))
    assert "model" in text_of(header_line(200, "age", False, UNICODE, has_models=True))
