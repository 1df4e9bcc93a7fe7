"""A `UsageReport` as lines of text: who used how much, and what a token costs, as `daemon/cost.py` defines it."""

from collections.abc import Callable, Iterator

from pagedd.client.questions import UsageReport
from pagedd.client.render import Glyphs, printable, table
from pagedd.client.usage import CallerUsage, Cost

_SOURCES = {
    "gpu": "of the GPU's counter; the rest of the box is not in it",
    "cpu": "of the counters of the processor's packages; the rest of the box is not in it",
    "gpu+cpu": "of the counters of the GPU and of the processor's packages; the rest of the box is not in it",
    "stated": "from the wattage that [cost] watts states; nothing was measured",
}
_UNKNOWN_ENERGY = (
    "not known: no counter of a GPU or of the processor's packages can be read; state [cost] watts, or let the daemon "
    "read /sys/class/powercap"
)
_NUM_DIGITS = 6
_LARGE = 1e9  # from here on a power of ten reads better than so many digits
_ROWS: tuple[tuple[str, Callable[[Cost], float | None], int], ...] = (
    ("prompt tokens", lambda cost: cost.prompt_tokens, 0),
    ("  of them cached", lambda cost: cost.cached_tokens, 0),
    ("output tokens", lambda cost: cost.output_tokens, 0),
    ("J", lambda cost: cost.joules, 1),
    ("J / token", lambda cost: cost.joules_per_token, 4),
    ("J / prompt token", lambda cost: cost.joules_per_prompt_token, 4),
    ("J / output token", lambda cost: cost.joules_per_output_token, 4),
    ("money", lambda cost: cost.money, 6),
    ("money / million prompt tokens", lambda cost: cost.money_per_million_prompt_tokens, 4),
    ("money / million output tokens", lambda cost: cost.money_per_million_output_tokens, 4),
)


def render_usage(report: UsageReport, glyphs: Glyphs) -> list[str]:
    """A row for each caller, since the daemon started, those who were here last at the end."""
    header = ["who", "requests", "live", "prompt", "cached", "output", "refused", "left/min", "J", "money"]
    rows = [
        [
            printable(caller.caller),
            _limited(caller.num_requests, None),
            _limited(caller.num_in_flight, caller.max_requests),
            str(caller.since_start.prompt_tokens),
            str(caller.since_start.cached_tokens),
            str(caller.since_start.output_tokens),
            _refusals(caller),
            glyphs.missing if caller.tokens_left is None else f"{caller.tokens_left:.0f}/{caller.tokens_per_minute}",
            _number(caller.since_start.joules, 1, glyphs),
            _number(caller.since_start.money, 6, glyphs),
        ]
        for caller in report.callers
    ]
    if not rows:
        return ["nobody has asked for anything since the daemon started"]
    return list(table([header, *rows], left={0, 6}))


def render_cost(report: UsageReport, glyphs: Glyphs) -> list[str]:
    """What energy and money are made of, both spans of all callers, then a row for each caller."""
    totals = [
        [name, _number(of(report.last_minute), decimals, glyphs), _number(of(report.since_start), decimals, glyphs)]
        for name, of, decimals in _ROWS
    ]
    return [
        *_notes(report, glyphs),
        "",
        *table([["", "last minute", "since start"], *totals], left={0}),
        *_callers(report, glyphs),
    ]


def _notes(report: UsageReport, glyphs: Glyphs) -> Iterator[str]:
    yield f"energy: {_SOURCES.get(report.energy_source, _UNKNOWN_ENERGY)}"
    if report.idle_joules is not None:
        yield f"        {_number(report.idle_joules, 1, glyphs)} J more were used without work, and are nobody's"
    parts = [
        name for name, is_there in (("the box", report.has_box_price), ("its power", report.has_kwh_price)) if is_there
    ]
    if len(parts) == 2:
        yield "money:  the box and its power, in the currency of [cost]"
    elif parts:
        lacking = "[cost] box_price" if not report.has_box_price else "[cost] kwh_price, and energy that is known"
        yield f"money:  {parts[0]} alone; the rest needs {lacking}"
    else:
        yield "money:  not known: state [cost] box_price, and kwh_price where energy is known"


def _callers(report: UsageReport, glyphs: Glyphs) -> Iterator[str]:
    if not report.callers:
        return
    header = ["who", "J, last minute", "J / token", "J, since start", "J / token", "money", "/M prompt", "/M output"]
    rows = [
        [
            printable(caller.caller),
            _number(caller.last_minute.joules, 1, glyphs),
            _number(caller.last_minute.joules_per_token, 4, glyphs),
            _number(caller.since_start.joules, 1, glyphs),
            _number(caller.since_start.joules_per_token, 4, glyphs),
            _number(caller.since_start.money, 6, glyphs),
            _number(caller.since_start.money_per_million_prompt_tokens, 4, glyphs),
            _number(caller.since_start.money_per_million_output_tokens, 4, glyphs),
        ]
        for caller in report.callers
    ]
    yield ""
    yield from table([header, *rows], left={0})


def _number(value: float | None, decimals: int, glyphs: Glyphs) -> str:
    """A count in full, else six digits or so, whatever the prices are. What is more than nothing never reads as 0."""
    if value is None:
        return glyphs.missing
    if decimals and value >= _LARGE:
        return f"{value:.{_NUM_DIGITS - 1}e}"
    num_whole_digits = len(str(int(value))) if value >= 1 else 0
    text = f"{value:.{max(0, min(decimals, _NUM_DIGITS - num_whole_digits))}f}"
    return f"{value:.1e}" if value and not float(text) else text


def _limited(number: int, limit: int | None) -> str:
    return str(number) if limit is None else f"{number}/{limit}"


def _refusals(caller: CallerUsage) -> str:
    """Which limit of its quota refused it, and how often."""
    return ", ".join(f"{limit} x{number}" for limit, number in sorted(caller.refusals.items())) or "0"
