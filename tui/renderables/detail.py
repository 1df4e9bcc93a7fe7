"""One sequence from close by: its figures, what it has been through, and its block table.

Of one that has ended they are the last that was seen: its blocks are somebody else's by now.
"""

from dataclasses import dataclass

from pagedd.client.stats_frame import Ending
from pagedd.tui.glyphs import Glyphs
from pagedd.tui.line import Line, Span, cut, printable, wrap
from pagedd.tui.pool import Pool
from pagedd.tui.renderables import numbers
from pagedd.tui.renderables.requests import STATE_ROLES, mark, name
from pagedd.tui.state import Sequence
from pagedd.tui.timeline import UNSEEN

_ENTRY_WIDTH = 20
_OUTCOMES = {"stop": "ended by itself", "length": "ended at its limit", "abort": "cancelled"}


@dataclass(frozen=True, slots=True)
class TableEntry:
    """A line of a block table: the logical block is in `block`, with so many tokens."""

    logical: int
    block: int
    num_tokens: int
    is_shared: bool
    is_hit: bool
    has_room: bool


def outcome(ending: Ending | None) -> Span:
    """How a request ended, in words; None when nobody said."""
    if ending is None:
        return "ended", "strong"
    told = _OUTCOMES.get(ending.outcome)
    return (told, "strong") if told is not None else (f"failed: {printable(ending.outcome)}", "bad")


def figure_lines(
    sequence: Sequence, block_size: int, width: int, glyphs: Glyphs, end: Span | None = None
) -> list[Line]:
    """Who, how far, how fast, and what the last block wastes; `end` says how it ended, of one that has."""
    row, missing = sequence.row, glyphs.missing
    held = row.num_blocks * block_size
    wasted = max(0, held - row.num_computed_tokens) if held else None
    is_live = end is None
    parts: list[list[Span]] = [
        [mark(sequence, glyphs) if is_live else (glyphs.free, "faint"), (f" {name(sequence)}", "strong")],
        [("who ", "dim"), (printable(row.user) or missing, "")],
        [("priority ", "dim"), (str(row.priority), "")],
        [end or (printable(row.state), STATE_ROLES.get(row.state, ""))],
        [("age " if is_live else "lived ", "dim"), (numbers.duration(row.age_s), "")],
        [("prompt ", "dim"), (f"{row.num_prompt_tokens} tokens", "")],
        [("cached ", "dim"), (f"{row.num_cached_tokens} tokens", "")],
        [("computed ", "dim"), (f"{row.num_computed_tokens} tokens", "")],
        [("out ", "dim"), (f"{row.num_output_tokens} tokens", "")],
        [
            ("speed" if is_live else "mean speed", "dim"),
            (
                f"{numbers.decimal(sequence.tokens_per_s if is_live else _mean_speed(sequence), 7, 1, missing)} tok/s",
                "",
            ),
        ],
        [("first token ", "dim"), (numbers.milliseconds(row.first_token_s, missing).strip(), "")],
        [("blocks " if is_live else "held blocks ", "dim"), (str(row.num_blocks), "")],
        [("wasted slots ", "dim"), (missing if wasted is None else str(wasted), "")],
        [
            ("preempted ", "dim"),
            (_times(row.num_preemptions), "warn" if row.num_preemptions else ""),
        ],
    ]
    return [cut(line, width) for line in wrap(parts, width, "   ")]


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _mean_speed(sequence: Sequence) -> float | None:
    """Tokens a second since the first one."""
    row = sequence.row
    if row.first_token_s is None or row.age_s <= row.first_token_s:
        return None
    return row.num_output_tokens / (row.age_s - row.first_token_s)


def timeline_lines(sequence: Sequence, width: int, glyphs: Glyphs) -> list[Line]:
    """A band from arrival to now, a glyph a state, and what each took."""
    timeline = sequence.timeline
    looks = {
        "waiting": (glyphs.queued, "state.waiting"),
        "prefill": (glyphs.prefill, "state.prefill"),
        "decode": (glyphs.decode, "state.decode"),
        "preempted": (glyphs.preempted, "state.preempted"),
        UNSEEN: (glyphs.free, "faint"),
    }
    total = timeline.phases[-1].end_s if timeline.phases else 0.0
    band: list[Span] = []
    at = 0
    for phase in timeline.phases:
        end = width if phase is timeline.phases[-1] else min(width, round(phase.end_s / total * width)) if total else at
        # However short, a phase that was shows.
        end = min(width, max(end, at + 1))
        glyph, role = looks.get(phase.state, looks[UNSEEN])
        band.append((glyph * (end - at), role))
        at = end
    labels = {"waiting": "queued", UNSEEN: "before pagetop looked"}
    parts: list[list[Span]] = []
    for state, (glyph, role) in looks.items():
        seconds = timeline.seconds(state)
        if any(phase.state == state for phase in timeline.phases):
            num_chunks = timeline.num_chunks()
            chunks = f" in {num_chunks} chunk{'s' * (num_chunks != 1)}" if state == "prefill" else ""
            parts.append(
                [
                    (f"{glyph} ", role),
                    (f"{labels.get(state, state)} ", "dim"),
                    (f"{numbers.duration(seconds)}{chunks}", ""),
                ]
            )
    return [band, *(cut(line, width) for line in wrap(parts, width, "   "))]


def table_entries(sequence: Sequence, pool: Pool) -> list[TableEntry]:
    """The block table of a live sequence, as the newest frame has it."""
    row, block_size = sequence.row, pool.block_size
    entries = []
    for logical, block in enumerate(row.block_table):
        is_known = block < pool.num_blocks
        written = max(0, min(block_size, row.num_computed_tokens - logical * block_size))
        num_tokens = pool.fills[block] if is_known and pool.fills else written
        entries.append(
            TableEntry(
                logical=logical,
                block=block,
                num_tokens=num_tokens,
                is_shared=is_known and pool.ref_counts[block] > 1,
                is_hit=(logical + 1) * block_size <= row.num_cached_tokens,
                has_room=num_tokens < block_size,
            )
        )
    return entries


def table_lines(entries: list[TableEntry], width: int, glyphs: Glyphs) -> list[Line]:
    """A block table, `logical → physical`, with tokens and marks, in as many columns as fit, read downwards."""
    num_columns = max(1, width // _ENTRY_WIDTH)
    num_rows = -(-len(entries) // num_columns)
    lines: list[Line] = []
    for at in range(num_rows):
        line: list[Span] = []
        for entry in entries[at::num_rows]:
            line += _entry(entry, glyphs)
        lines.append(cut(line, width))
    return lines


def table_legend(glyphs: Glyphs, width: int) -> Line:
    return cut(
        [
            (f"logical {glyphs.arrow} physical, tokens   ", "dim"),
            ("S", "shared"),
            (" shared   ", "dim"),
            ("c", "accent"),
            (" from the cache   ", "dim"),
            (glyphs.open_tail, "strong"),
            (" has room", "dim"),
        ],
        width,
    )


def _entry(entry: TableEntry, glyphs: Glyphs) -> list[Span]:
    """`  12 → 0041  16 S  `, padded to the width of a column."""
    tag: Span = (" ", "")
    if entry.is_shared:
        tag = ("S", "shared")
    elif entry.is_hit:
        tag = ("c", "accent")
    elif entry.has_room:
        tag = (glyphs.open_tail, "strong")
    arrow = glyphs.arrow if len(glyphs.arrow) > 1 else f" {glyphs.arrow}"
    text = f"{entry.logical:4d}{arrow} {entry.block:04}"
    spans: list[Span] = [(text, ""), (f"{entry.num_tokens:4d} ", "dim"), tag]
    return [*spans, (" " * max(1, _ENTRY_WIDTH - sum(len(part) for part, _ in spans)), "")]
