"""Whether a message can be shown at all: its numbers are numbers, a frame's map and block tables fit each other.

A daemon of this project sends no other, but another program may listen in its place, and a recording may be damaged.
Everything behind this check may rely on it.
"""

from collections.abc import Iterator

from pagedd.client.questions import BlockDetail, Prefixes, RequestText
from pagedd.client.stats_frame import BlockMap, StatsFrame

# Far beyond any figure; what is under it can be formatted, added and rounded.
_MAX_NUMBER = 1e18
_MAX_TIME_S = 1e11
# A picture that is due later than that would never be late.
_MAX_INTERVAL_S = 60.0


def nonsense(message: StatsFrame | BlockDetail | Prefixes | RequestText) -> str | None:
    """Why this frame, or this answer, cannot be shown; None when it can."""
    for name, value in _numbers(message):
        # Written so that NaN, which compares with nothing, is one as well.
        if value is not None and not -_MAX_NUMBER < value < _MAX_NUMBER:
            return f"{name} is {value}"
    return _misfit(message) if isinstance(message, StatsFrame) else None


def _numbers(message: StatsFrame | BlockDetail | Prefixes | RequestText) -> Iterator[tuple[str, float | None]]:
    match message:
        case StatsFrame():
            yield from _numbers_of_frame(message)
        case BlockDetail():
            yield "last_use_s", message.last_use_s
        case Prefixes():
            yield from (("a prefix's age_s", node.age_s) for node in message.nodes)
        case RequestText():
            pass  # has none


def _misfit(frame: StatsFrame) -> str | None:
    if not 0 < frame.interval_s < _MAX_INTERVAL_S:
        return f"interval_s is {frame.interval_s}"
    for name, time_s in (("time_s", frame.time_s), *(("an event's time_s", event.time_s) for event in frame.events)):
        if not 0 <= time_s < _MAX_TIME_S:
            return f"{name} is {time_s}"
    return None if frame.blocks is None else _misfit_of_blocks(frame, frame.blocks)


def _numbers_of_frame(frame: StatsFrame) -> Iterator[tuple[str, float | None]]:
    yield "uptime_s", frame.uptime_s
    yield from frame.figures.items()
    for row in frame.requests:
        yield "a request's age_s", row.age_s
        yield "a request's first_token_s", row.first_token_s
    if (machine := frame.machine) is not None:
        for holder in (machine, *machine.devices):
            for name in holder.__struct_fields__:
                value = getattr(holder, name)
                if isinstance(value, float):
                    yield name, value
        for device in machine.devices:
            yield from ((f"the memory of {name!r}", held) for name, held in device.others)


def _misfit_of_blocks(frame: StatsFrame, blocks: BlockMap) -> str | None:
    num_blocks = len(blocks.states)
    if blocks.block_size < 1:
        return f"block_size is {blocks.block_size}"
    if len(blocks.ref_counts) != num_blocks:
        return f"{len(blocks.ref_counts)} reference counts of {num_blocks} blocks"
    for row in frame.requests:
        if row.block_table and not (min(row.block_table) >= 0 and max(row.block_table) < num_blocks):
            return f"a block table names a block outside of the {num_blocks}"
    return None
