"""The batch: seats and token budget in use, who waits, and what a token costs."""

from pagedd.tui.glyphs import Glyphs
from pagedd.tui.line import Line, Span, as_fits, cut
from pagedd.tui.renderables import numbers
from pagedd.tui.renderables.bars import bar
from pagedd.tui.state import State

_LABEL = 7
_VALUE = 8  # " 512/512"; a budget of thousands takes two cells more


def batch_lines(state: State, width: int, glyphs: Glyphs) -> list[Line]:
    bar_width = max(4, width - _LABEL - 11)
    lines: list[list[Span]] = [
        _occupancy(state, "seats", "num_requests_running", "max_num_seqs", bar_width, glyphs),
        _occupancy(state, "tokens", "num_scheduled_tokens", "max_num_batched_tokens", bar_width, glyphs),
        as_fits(_waiting(state, glyphs), width, "  "),
        as_fits(_costs(state, glyphs), width, "  "),
    ]
    return [cut(line, width) for line in lines]


def batch_row(state: State, width: int, glyphs: Glyphs) -> Line:
    """The same on one line."""
    bar_width = max(6, min(24, (width - 62) // 2))
    parts: list[Line] = [
        _occupancy(state, "seats", "num_requests_running", "max_num_seqs", bar_width, glyphs, label_width=6),
        _occupancy(state, "tokens", "num_scheduled_tokens", "max_num_batched_tokens", bar_width, glyphs),
        *_waiting(state, glyphs),
    ]
    if width < 60:
        del parts[1]
    return as_fits(parts, width, "  ")


def _occupancy(
    state: State, label: str, used: str, limit: str, bar_width: int, glyphs: Glyphs, label_width: int = _LABEL
) -> list[Span]:
    now, most = state.figure(used), state.figure(limit)
    share = None if now is None or not most else now / most
    whole = glyphs.missing if most is None else f"{most:.0f}"
    value = f"{glyphs.missing if now is None else f'{now:.0f}'}/{whole}"
    return [(label.ljust(label_width), "dim"), *bar(share, bar_width, glyphs), (value.rjust(_VALUE), "")]


def _costs(state: State, glyphs: Glyphs) -> list[Line]:
    """What the daemon says of energy and money (`daemon/cost.py`); amounts only where it was told prices."""
    missing = glyphs.missing
    joules = state.figure("energy_joules_per_token")
    prices = [state.figure(f"cost_per_million_{kind}_tokens") for kind in ("prompt", "output")]
    costs: Line = []
    if any(price is not None for price in prices):
        amounts = "/".join(missing if price is None else f"{price:.2g}" for price in prices)
        costs = [(amounts, ""), (" per M", "dim")]
    energy: Line = [("energy", "dim"), (numbers.decimal(joules, 5, 2, missing), ""), (" J/token", "dim")]
    steps: Line = [("steps", "dim"), (f"{numbers.count(state.rates['steps'], 5, missing)}/s", "")]
    return [part for part in (energy, costs, steps) if part]


def _waiting(state: State, glyphs: Glyphs) -> list[Line]:
    waiting, oldest_s = state.figure("num_requests_waiting"), state.figure("oldest_wait_s")
    num_preempted = sum(sequence.row.state == "preempted" for sequence in state.sequences)
    queue: list[Span] = [("waiting", "dim"), (numbers.count(waiting, 4, glyphs.missing), "warn" if waiting else "")]
    if waiting and oldest_s is not None:
        queue += [(f" (oldest {numbers.duration(oldest_s)})", "")]
    return [queue, [("preempted", "dim"), (numbers.count(num_preempted, 2), "warn" if num_preempted else "")]]
