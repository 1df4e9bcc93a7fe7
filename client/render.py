"""A `StatsFrame` as lines of text: the requests, the block map, the figures, the events; and the tree of prefixes.

Pure: frame in, lines out; the caller says how wide and with which glyphs. `pagectl.py` prints them. What the figures
mean is defined in `engine/stats.py`.
"""

import time
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pagedd.client.letters import LETTERS, letter_index
from pagedd.client.percent import percent
from pagedd.client.questions import Prefixes
from pagedd.client.stats_frame import BlockMap, Event, RequestRow, StatsFrame

# `S` marks shared blocks, so no sequence gets it.
_SHARED = "S"
_ENDED = "?"
_CACHED_STATE = 1
_USED_STATE = 2
_BLOCKS_PER_GROUP = 8

_RATIOS = frozenset({"kv_usage", "slot_fill", "fragmentation", "contiguous_fragmentation", "hit_rate"})
_UNITS = {  # the part of a figure's name that says its unit -> unit shown, factor, decimals
    "bytes": ("MiB", 1 / (1 << 20), 1),
    "s": ("s", 1, 3),
    "seconds": ("s", 1, 3),
    "watts": ("W", 1, 1),
    "joules": ("J", 1, 1),
    "celsius": ("C", 1, 0),
    "cores": ("cores", 1, 2),
}


@dataclass(frozen=True, slots=True)
class Glyphs:
    """What stands for what. A terminal that cannot show `UNICODE` gets `ASCII`."""

    cached: str
    free: str
    many: str
    missing: str
    separator: str

    @classmethod
    def for_encoding(cls, encoding: str | None) -> "Glyphs":
        try:
            "".join((UNICODE.cached, UNICODE.free, UNICODE.many, UNICODE.missing, UNICODE.separator)).encode(
                encoding or "ascii"
            )
        except (UnicodeEncodeError, LookupError):
            return ASCII
        return UNICODE


UNICODE = Glyphs(cached="▒", free="·", many="■", missing="–", separator=" · ")
ASCII = Glyphs(cached=":", free=".", many="#", missing="-", separator=", ")


def render_requests(frame: StatsFrame, glyphs: Glyphs) -> list[str]:
    """One line about the daemon, then a table with a row for each sequence; letters are those of the block map."""
    letters = _letters(frame.requests, glyphs)
    header = ["map", "id", "who", "prio", "state", "prompt", "cached", "out", "blocks", "first", "age"]
    rows = [
        [
            letter,
            _name(row),
            printable(row.user),
            str(row.priority),
            _state(row),
            str(row.num_prompt_tokens),
            str(row.num_cached_tokens) if row.num_blocks else glyphs.missing,
            str(row.num_output_tokens),
            str(row.num_blocks),
            glyphs.missing if row.first_token_s is None else _latency(row.first_token_s),
            _duration(row.age_s),
        ]
        for letter, row in zip(letters, frame.requests, strict=True)
    ]
    return [*_about(frame, glyphs), *table([header, *rows], left={0, 1, 2, 4})]


def render_blocks(frame: StatsFrame, glyphs: Glyphs, width: int) -> list[str]:
    """The block map, one cell a block in physical order, then its legend. A line that repeats is shown once, then `*`.

    Needs a frame asked for with its blocks; without them (no engine, or one in a long step) it says why.
    """
    blocks = frame.blocks
    if blocks is None:
        return [*_about(frame, glyphs), f"no block map now: {printable(frame.detail or frame.state)}"]
    letters = _letters(frame.requests, glyphs)
    owners = {block: letter for letter, row in zip(letters, frame.requests, strict=True) for block in row.block_table}
    cells = [_cell(blocks, block, owners, glyphs) for block in range(len(blocks.states))]
    num_used = blocks.states.count(_USED_STATE)
    num_cached = blocks.states.count(_CACHED_STATE)
    num_free = len(cells) - num_used - num_cached
    return [
        *_about(frame, glyphs),
        f"{len(cells)} blocks of {blocks.block_size} tokens: {num_used} used, {num_cached} cached, {num_free} free",
        *_map(cells, width),
        *_legend(frame.requests, letters, set(cells), glyphs, width),
    ]


def render_figures(frame: StatsFrame, glyphs: Glyphs) -> list[str]:
    """One line about the daemon, then every figure under the name that the code and `--json` give it."""
    rows = [[name, *_figure(name, value, glyphs)] for name, value in frame.figures.items()]
    return [*_about(frame, glyphs), *table(rows, left={0, 2})]


def render_prefixes(tree: Prefixes, glyphs: Glyphs) -> list[str]:
    """A row for each run of blocks without a branch; what continues it stands below, further in."""
    levels: dict[str, int] = {"": -1}
    rows = [["digest", "blocks", "tokens", "hits", "idle", "state", "who", "begins with"]]
    for node in tree.nodes:
        level = levels[node.digest] = levels.get(node.parent, -1) + 1
        rows.append(
            [
                node.digest,
                str(node.num_blocks),
                str(node.num_tokens),
                str(node.num_hits),
                _duration(node.age_s),
                node.state,
                printable(node.user) or "anybody",
                "  " * level + (glyphs.missing if node.text is None else _one_line(node.text)),
            ]
        )
    shown = sum(node.num_blocks for node in tree.nodes)
    summary = f"{tree.num_blocks} blocks are indexed" + (f"; {shown} of them are shown" if tree.is_cut else "")
    return [summary, *table(rows, left={0, 5, 6, 7})]


def render_events(events: Sequence[Event]) -> list[str]:
    """A line for each event, oldest first, with the local time."""
    rows = [
        [
            time.strftime("%H:%M:%S", time.localtime(event.time_s)),
            event.kind,
            printable(event.request_id),
            _one_line(event.reason),
        ]
        for event in events
    ]
    return list(table(rows, left={0, 1, 2, 3})) if rows else ["nothing has happened since the daemon started"]


def table(rows: list[list[str]], left: set[int]) -> Iterator[str]:
    """Rows as lines with columns as wide as they need; `left` are the columns that are flush left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()


def redrawn(lines: Sequence[str], columns: int, rows: int) -> str:
    """What puts `lines` in the place of whatever a terminal of that size shows, without flicker; the rest is cut off.

    A line is cleared just before it is written: were the screen as a whole, it would be seen empty. A longer picture
    would scroll.
    """
    return "\x1b[H" + "".join(f"\x1b[K{line[:columns]}\n" for line in lines[: rows - 1]) + "\x1b[J"


def printable(text: str) -> str:
    """`text` without control characters: a name or a model's answer must not be able to steer the terminal."""
    return "".join(
        "\N{REPLACEMENT CHARACTER}" if unicodedata.category(char) == "Cc" and char not in "\n\t" else char
        for char in text
    )


def _one_line(text: str) -> str:
    return " ".join(printable(text).split())


def _about(frame: StatsFrame, glyphs: Glyphs) -> list[str]:
    kv_cache_dtype = frame.kv_cache_dtype and f"kv {frame.kv_cache_dtype}"
    if (agreement := frame.figures.get("kv_agreement_ratio")) is not None:
        kv_cache_dtype += f" ({percent(agreement, decimals=1)}% as 16 bits)"
    parts = [
        frame.model,
        frame.device,
        frame.dtype,
        kv_cache_dtype,
        frame.state_in_words,
        f"up {_duration(frame.uptime_s)}",
    ]
    return [glyphs.separator.join(printable(part) for part in parts if part)]


def _letters(requests: Sequence[RequestRow], glyphs: Glyphs) -> list[str]:
    """A letter for each sequence that has blocks, a sign that there are too many, or the free cell's glyph for none."""
    letters: list[str] = []
    taken: set[int] = set()
    for row in requests:
        index = letter_index(len(taken) if row.number is None else row.number, taken)
        if not row.num_blocks:
            letters.append(glyphs.free)
        elif index is None:
            letters.append(glyphs.many)
        else:
            taken.add(index)
            letters.append(LETTERS[index])
    return letters


def _name(row: RequestRow) -> str:
    return printable(f"{row.request_id}/{row.index}" if row.index else row.request_id)


def _state(row: RequestRow) -> str:
    if row.state != "prefill" or not row.num_prompt_tokens:
        return row.state
    return f"prefill {percent(row.num_computed_tokens / row.num_prompt_tokens)}%"


def _cell(blocks: BlockMap, block: int, owners: dict[int, str], glyphs: Glyphs) -> str:
    if blocks.states[block] == _USED_STATE:
        return _SHARED if blocks.ref_counts[block] > 1 else owners.get(block, _ENDED)
    return glyphs.cached if blocks.states[block] == _CACHED_STATE else glyphs.free


def _map(cells: list[str], width: int) -> Iterator[str]:
    label_width = max(4, len(str(len(cells) - 1)))
    num_groups = max(1, (width - label_width) // (_BLOCKS_PER_GROUP + 1))
    per_line = num_groups * _BLOCKS_PER_GROUP
    previous: list[str] = []
    is_repeating = False
    for start in range(0, len(cells), per_line):
        line = cells[start : start + per_line]
        is_last = start + per_line >= len(cells)
        if line == previous and not is_last:
            if not is_repeating:
                yield "*"
            is_repeating = True
            continue
        previous, is_repeating = line, False
        groups = ("".join(line[at : at + _BLOCKS_PER_GROUP]) for at in range(0, len(line), _BLOCKS_PER_GROUP))
        yield f"{start:0{label_width}} {' '.join(groups)}"


def _legend(
    requests: Sequence[RequestRow], letters: list[str], shown: set[str], glyphs: Glyphs, width: int
) -> Iterator[str]:
    meanings = [
        f"{letter} {_name(row)} ({printable(row.user)})"
        for letter, row in zip(letters, requests, strict=True)
        if letter in LETTERS
    ]
    meanings += [
        f"{glyph} {meaning}"
        for glyph, meaning in (
            (glyphs.many, "another sequence"),
            (_ENDED, "a sequence that has just ended"),
            (_SHARED, "shared"),
            (glyphs.cached, "cached"),
            (glyphs.free, "free"),
        )
        if glyph in shown
    ]
    line = ""
    for meaning in meanings:
        if line and len(line) + 3 + len(meaning) > width:
            yield line
            line = ""
        line += f"   {meaning}" if line else meaning
    if line:
        yield line


def _figure(name: str, value: float | None, glyphs: Glyphs) -> tuple[str, str]:
    """Value and unit, which a figure's name carries."""
    if value is None:
        return glyphs.missing, ""
    if name in _RATIOS or name.endswith("_ratio"):
        return percent(value, decimals=1), "%"
    kind = next((part for part in reversed(name.split("_")) if part in _UNITS), "")
    if kind:
        unit, factor, decimals = _UNITS[kind]
        return f"{value * factor:.{decimals}f}", unit
    return (f"{value:.0f}" if float(value).is_integer() else f"{value:.3f}"), ""


def _latency(seconds: float) -> str:
    """As `pagetop` has it: tenths of short ones, whole seconds of very long ones."""
    if seconds >= 10:
        return f"{seconds:.0f} s"
    return f"{seconds * 1000:.{1 if seconds < 0.1 else 0}f} ms"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest_s = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{rest_s:02}" if hours else f"{minutes}:{rest_s:02}"
