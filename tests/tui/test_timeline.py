"""What a sequence has been through, as far as frames tell."""

from pagedd.bench.frames import FakeEngine
from pagedd.client.stats_frame import RequestRow
from pagedd.tui.glyphs import UNICODE
from pagedd.tui.line import text_of
from pagedd.tui.renderables.detail import timeline_lines
from pagedd.tui.state import Sequence
from pagedd.tui.timeline import Timeline


def row(state: str, age_s: float, num_computed_tokens: int = 0, first_token_s: float | None = None) -> RequestRow:
    made = FakeEngine().frame().requests[0]
    made.state, made.age_s = state, age_s
    made.num_computed_tokens, made.first_token_s = num_computed_tokens, first_token_s
    return made


def phases(timeline: Timeline) -> list[tuple[str, float, float]]:
    return [(phase.state, phase.start_s, phase.end_s) for phase in timeline.phases]


def test_phases_follow_each_other_without_gaps() -> None:
    timeline = Timeline()
    for state, age_s, computed in (
        ("waiting", 1.0, 0),
        ("prefill", 2.0, 64),
        ("prefill", 3.0, 128),
        ("decode", 4.0, 129),
    ):
        timeline.take(row(state, age_s, computed))
    assert phases(timeline) == [("waiting", 0.0, 1.0), ("prefill", 1.0, 3.0), ("decode", 3.0, 4.0)]
    assert timeline.num_chunks() == 2
    assert timeline.seconds("prefill") == 2.0


def test_a_sequence_that_was_there_before_has_an_unseen_past_up_to_its_first_token() -> None:
    timeline = Timeline()
    timeline.take(row("decode", 8.0, 500, first_token_s=2.0))
    assert phases(timeline) == [("unseen", 0.0, 2.0), ("decode", 2.0, 8.0)]


def test_the_band_is_as_wide_as_the_panel_and_shows_each_phase() -> None:
    sequence = Sequence(row("decode", 10.0))
    for state, age_s in (("waiting", 2.0), ("prefill", 4.0), ("preempted", 4.1), ("decode", 10.0)):
        sequence.timeline.take(row(state, age_s))
    band, legend = timeline_lines(sequence, 20, UNICODE)[0], timeline_lines(sequence, 80, UNICODE)[1]
    assert text_of(band) == "┄┄┄┄▒▒▒▒▚███████████"
    assert text_of(legend).startswith("┄ queued 2.0 s   ▒ prefill 2.0 s in 0 chunks   █ decode 5.9 s")
