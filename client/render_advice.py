"""What `pagectl doctor` prints: each finding with its figures, what to change, and what that should bring."""

from collections.abc import Iterator

from pagedd.client.protocol import StatsFrame
from pagedd.client.render import printable

# As `daemon/advice.py` has it.
_LEAST_BUSY_S = 15


def render_advice(frame: StatsFrame) -> Iterator[str]:
    for advice in frame.advice:
        yield f"{advice.cause}: {printable(advice.finding)}"
        yield f"  change  {printable(advice.change)}"
        yield f"  brings  {printable(advice.gain)}"
    if frame.advice:
        return
    observed_s = frame.figures.get("observed_seconds") or 0.0
    yield f"nothing to advise after {observed_s:.0f} s of work in the last minutes"
    if observed_s < _LEAST_BUSY_S:
        yield f"  averages need {_LEAST_BUSY_S} s of work; ask again under your usual load"
