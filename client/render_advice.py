"""What `pagectl doctor` prints: each finding with its figures, what to change, and what that should bring."""

from collections.abc import Iterator

from pagedd.client.render import printable
from pagedd.client.stats_frame import StatsFrame


def render_advice(frame: StatsFrame) -> Iterator[str]:
    for advice in frame.advice:
        yield f"{advice.cause}: {printable(advice.finding)}"
        yield f"  change  {printable(advice.change)}"
        yield f"  brings  {printable(advice.gain)}"
    if frame.advice:
        return
    observed_s = frame.figures.get("observed_seconds") or 0.0
    yield f"nothing to advise after {observed_s:.0f} s of work in the last minutes"
    wanted_s = frame.figures.get("observed_seconds_wanted") or 0.0
    if observed_s < wanted_s:
        yield f"  averages need {wanted_s:.0f} s of work; ask again under your usual load"
