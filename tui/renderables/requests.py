"""The requests as a table: which columns fit, which rows match a filter, in which order, and how a row reads."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pagedd.tui.glyphs import Glyphs
from pagedd.tui.line import Line, Span, fit, printable
from pagedd.tui.renderables import numbers
from pagedd.tui.state import Sequence

STATE_ROLES = {
    "decode": "state.decode",
    "prefill": "state.prefill",
    "waiting": "state.waiting",
    "preempted": "state.preempted",
}


_STATE_WIDTH = 11


@dataclass(frozen=True, slots=True)
class Column:
    """`rank` says who stays when the width does not hold all: the lowest ranks do.

    Attributes:
        cell: the text and role of a row's cell.
        order: what rows are sorted by; None cannot be sorted by.
        is_descending: the order to begin with is from the largest.
    """

    name: str
    width: int
    rank: int
    cell: Callable[[Sequence, Glyphs], Span]
    order: Callable[[Sequence], Any] | None = None
    is_left: bool = False
    is_descending: bool = False


def _lead(column: Column) -> str:
    """What stands before a column; right-aligned ones have room of their own."""
    return "  " if column.is_left else " "


def mark(sequence: Sequence, glyphs: Glyphs) -> Span:
    """The letter that the block map has for a sequence, or the free block's glyph when it has no blocks."""
    if sequence.mark is None:
        return glyphs.free, "faint"
    return sequence.mark.letter or glyphs.many, f"own{sequence.mark.hue}"


def name(sequence: Sequence) -> str:
    """A request's id, with the choice's number when it is not the first."""
    row = sequence.row
    return printable(f"{row.request_id}/{row.index}" if row.index else row.request_id)


def short_name(sequence: Sequence) -> str:
    """The same in at most eight cells, which seldom leave a doubt."""
    row = sequence.row
    shown = printable(row.request_id)[: 8 if not row.index else 6]
    return f"{shown}/{row.index}" if row.index else shown


def _state(sequence: Sequence, glyphs: Glyphs) -> Span:
    row = sequence.row
    text = fit(printable(row.state), _STATE_WIDTH, glyphs.ellipsis)
    if row.state == "prefill" and row.num_prompt_tokens:
        share = numbers.whole_percent(min(1.0, row.num_computed_tokens / row.num_prompt_tokens))
        text = f"prefill{share[:3]}%"
    return text, STATE_ROLES.get(row.state, "")


def _speed(sequence: Sequence) -> float | None:
    """None for one that cannot have drawn a token yet, where 0 would look like one that is stuck."""
    return sequence.tokens_per_s if sequence.row.num_output_tokens else None


def _number(value: float | None, width: int, glyphs: Glyphs) -> Span:
    return numbers.count(value, width, glyphs.missing), "" if value else "dim"


_MODEL = "model"
COLUMNS = (
    Column("id", 8, 0, lambda s, g: (short_name(s), ""), lambda s: name(s), is_left=True),
    Column("who", 8, 3, lambda s, g: (fit(printable(s.row.user), 8, g.ellipsis), ""), lambda s: s.row.user, True),
    Column("prio", 5, 5, lambda s, g: (f"{s.row.priority:d}", ""), lambda s: s.row.priority, is_descending=True),
    Column("state", _STATE_WIDTH, 1, _state, lambda s: s.row.state, is_left=True),
    Column(
        *("prompt", 7, 6, lambda s, g: _number(s.row.num_prompt_tokens, 7, g)),
        order=lambda s: s.row.num_prompt_tokens,
        is_descending=True,
    ),
    Column(
        *("cached", 7, 8, lambda s, g: _number(s.row.num_cached_tokens if s.row.num_blocks else None, 7, g)),
        order=lambda s: s.row.num_cached_tokens,
        is_descending=True,
    ),
    Column(
        *("out", 6, 2, lambda s, g: _number(s.row.num_output_tokens, 6, g)),
        order=lambda s: s.row.num_output_tokens,
        is_descending=True,
    ),
    Column(
        *("blocks", 7, 7, lambda s, g: _number(s.row.num_blocks, 7, g)),
        order=lambda s: s.row.num_blocks,
        is_descending=True,
    ),
    Column(
        *("tok/s", 6, 4, lambda s, g: (numbers.decimal(_speed(s), 6, 1, g.missing), "")),
        order=lambda s: _speed(s) or 0.0,
        is_descending=True,
    ),
    Column(
        *("first", 9, 9, lambda s, g: (numbers.milliseconds(s.row.first_token_s, g.missing), "")),
        order=lambda s: s.row.first_token_s or float("inf"),
    ),
    Column(
        *("age", 8, 10, lambda s, g: (numbers.duration(s.row.age_s), "")),
        order=lambda s: s.row.age_s,
        is_descending=True,
    ),
    Column(_MODEL, 16, 12, lambda s, g: (fit(printable(s.row.model), 16, g.ellipsis), "dim"), is_left=True),
)
SORTS = tuple(column.name for column in COLUMNS if column.order is not None)
# The text of a request takes what is left, when that is enough to read.
_WHAT = "what"
_MIN_WHAT = 12
_MARK_WIDTH = 1
# Columns from these ranks on come only when the text has that much besides: words tell requests apart.
_LEAST_BESIDE = {5: 22, 11: 32}


@lru_cache(maxsize=8)
def columns_for(width: int, has_models: bool = False) -> list[Column]:
    """The columns that fit into `width`, in the table's order; `has_models` when the rows' models differ."""
    chosen: set[str] = set()
    used = _MARK_WIDTH
    wanted = [column for column in COLUMNS if has_models or column.name != _MODEL]
    for column in sorted(wanted, key=lambda column: column.rank):
        reserved = max((least for rank, least in _LEAST_BESIDE.items() if column.rank >= rank), default=0)
        if used + len(_lead(column)) + column.width + reserved > width:
            break
        chosen.add(column.name)
        used += len(_lead(column)) + column.width
    return [column for column in COLUMNS if column.name in chosen]


def header_line(width: int, sort: str, is_reversed: bool, glyphs: Glyphs, has_models: bool = False) -> Line:
    """The columns' names, with the direction at the one that the rows are sorted by."""
    line: list[Span] = [(" " * _MARK_WIDTH, "")]
    columns = columns_for(width, has_models)
    for column in columns:
        is_sort = column.name == sort
        is_falling = column.is_descending != is_reversed
        text = column.name + ((glyphs.down if is_falling else glyphs.up) if is_sort else "")
        aligned = text.ljust(column.width) if column.is_left else text.rjust(column.width)
        line += [(_lead(column), ""), (aligned[: column.width], "accent" if is_sort else "dim")]
    if _room(width, has_models) >= _MIN_WHAT:
        line.append((f"  {_WHAT}", "dim"))
    return line


def request_line(sequence: Sequence, width: int, glyphs: Glyphs, has_models: bool = False) -> Line:
    """One row, exactly `width` cells wide."""
    glyph, role = mark(sequence, glyphs)
    line: list[Span] = [(glyph, role)]
    columns = columns_for(width, has_models)
    for column in columns:
        text, cell_role = column.cell(sequence, glyphs)
        aligned = text.ljust(column.width) if column.is_left else text.rjust(column.width)
        line += [(_lead(column), ""), (aligned, cell_role)]
    room = _room(width, has_models)
    if room >= _MIN_WHAT:
        line += [("  ", ""), (fit(first_words(sequence, glyphs), room, glyphs.ellipsis), "dim")]
        return line
    return [*line, (" " * (width - _used(width, has_models)), "")]


def about_lines(sequence: Sequence, glyphs: Glyphs) -> list[Line]:
    """Which request this is, for somebody who is about to act on it: model, first words, how far, and its id."""
    row = sequence.row
    text, role = _state(sequence, glyphs)
    of_most = f" of at most {row.max_tokens}" if row.max_tokens is not None else ""
    words = first_words(sequence, glyphs)
    lines: list[Line] = [[(words, "")]] if words else []
    return [
        *lines,
        [
            (text.rstrip(), role),
            (f", {row.num_output_tokens} tokens{of_most} so far, prompt {row.num_prompt_tokens}", "dim"),
        ],
        [(printable(row.model) or glyphs.missing, ""), (glyphs.separator, "faint"), (name(sequence), "dim")],
    ]


def _room(width: int, has_models: bool) -> int:
    """What is left for the text, after the gap before it."""
    return width - _used(width, has_models) - 2


@lru_cache(maxsize=8)
def _used(width: int, has_models: bool) -> int:
    """Cells of the columns that fit into `width`."""
    return _MARK_WIDTH + sum(len(_lead(column)) + column.width for column in columns_for(width, has_models))


def first_words(sequence: Sequence, glyphs: Glyphs) -> str:
    """Of its prompt, in quotes; "" when there are none that the viewer may see."""
    row = sequence.row
    quote = "“”" if glyphs.is_unicode else '""'
    return f"{quote[0]}{printable(row.preview)}{quote[1]}" if row.preview else ""


def sort_of(x: int, width: int, has_models: bool = False) -> str | None:
    """The column under `x` of the header, if rows can be sorted by it."""
    left = _MARK_WIDTH
    for column in columns_for(width, has_models):
        left += len(_lead(column))
        if left <= x < left + column.width:
            return column.name if column.order is not None else None
        left += column.width
    return None


def models_differ(sequences: Iterable[Sequence]) -> bool:
    """Otherwise the header says which it is."""
    return len({sequence.row.model for sequence in sequences}) > 1


def arranged(sequences: Iterable[Sequence], words: str, sort: str, is_reversed: bool) -> list[Sequence]:
    """The sequences in which every word of a filter occurs, in the order of column `sort`; equal ones by age."""
    wanted = words.lower().split()
    column = next(column for column in COLUMNS if column.name == sort)
    order = column.order
    assert order is not None
    matching = [sequence for sequence in sequences if all(word in _searched(sequence) for word in wanted)]
    matching.sort(key=lambda sequence: (-sequence.row.age_s, sequence.key))
    matching.sort(key=order, reverse=column.is_descending != is_reversed)
    return matching


def _searched(sequence: Sequence) -> str:
    row = sequence.row
    return f"{row.request_id} {row.user} {row.state} {row.model} {row.preview}".lower()
