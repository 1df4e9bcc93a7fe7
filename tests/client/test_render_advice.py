"""Advice as lines: what was found, what to change, what it brings; and what nothing means."""

from pagedd.client.render_advice import render_advice
from pagedd.client.stats_frame import Advice, StatsFrame


def frame(*advice: Advice, observed_s: float = 60.0) -> StatsFrame:
    return StatsFrame(
        version="",
        time_s=0.0,
        uptime_s=0.0,
        state="ready",
        detail="",
        model="",
        device="",
        dtype="",
        kv_cache_dtype="",
        figures={"observed_seconds": observed_s, "observed_seconds_wanted": 20.0},
        requests=[],
        advice=list(advice),
    )


def test_each_piece_has_three_lines() -> None:
    advice = Advice(cause="fragmentation", finding="12 % lost\x1b", change="--block-size 8", gain="6 % more room")
    assert list(render_advice(frame(advice))) == [
        "fragmentation: 12 % lost�",
        "  change  --block-size 8",
        "  brings  6 % more room",
    ]


def test_nothing_after_enough_work_is_all_well() -> None:
    assert list(render_advice(frame())) == ["nothing to advise after 60 s of work in the last minutes"]


def test_nothing_after_little_work_says_so() -> None:
    assert list(render_advice(frame(observed_s=3.0)))[1:] == [
        "  averages need 20 s of work; ask again under your usual load"
    ]
