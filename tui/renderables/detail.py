"""One sequence from close by: its figures, what it has been through, and its block table."""

from pagedd.tui.glyphs import Glyphs
from pagedd.tui.line import Line, Span, cut, printable, wrap
from pagedd.tui.renderables import numbers
from pagedd.tui.renderables.requests import STATE_ROLES, mark, name
from pagedd.tui.state import Sequence, State
from pagedd.tui.timeline import UNSEEN

_ENTRY_WIDTH = 20


def figure_lines(sequence: Sequence, block_size: int, width: int, glyphs: Glyphs) -> list[Line]:
    """Who, how far, how fast, and what the last block wastes."""
    row, missing = sequence.row, glyphs.missing
    held = row.num_blocks * block_size
    wasted = max(0, held - row.num_computed_tokens) if held else None
    parts: list[list[Span]] = [
        [mark(sequence, glyphs), (f" {name(sequence)}", "strong")],
        [("who ", "dim"), (printable(row.user) or missing, "")],
        [("priority ", "dim"), (str(row.priority), "")],
        [(printable(row.state), STATE_ROLES.get(row.state, ""))],
        [("age ", "dim"), (numbers.duration(row.age_s), "")],
        [("prompt ", "dim"), (f"{row.num_prompt_tokens} tokens", "")],
        [("cached ", "dim"), (f"{row.num_cached_tokens} tokens", "")],
        [("computed ", "dim"), (f"{row.num_computed_tokens} tokens", "")],
        [("out ", "dim"), (f"{row.num_output_tokens} tokens", "")],
        [("speed", "dim"), (f"{numbers.decimal(sequence.tokens_per_s, 7, 1, missing)} tok/s", "")],
        [("first token ", "dim"), (numbers.milliseconds(row.first_token_s, missing).strip(), "")],
        [("blocks ", "dim"), (str(row.num_blocks), "")],
        [("wasted slots ", "dim"), (missing if wasted is None else str(wasted), "")],
        [("preempted ", "dim"), (f"{row.num_preemptions} times", "warn" if row.num_preemptions else "")],
    ]
    return [cut(line, width) for line in wrap(parts, width, "   ")]


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
            chunks = f" in {timeline.num_chunks()} chunks" if state == "prefill" else ""
            parts.append(
                [
                    (f"{glyph} ", role),
                    (f"{labels.get(state, state)} ", "dim"),
                    (f"{numbers.duration(seconds)}{chunks}", ""),
                ]
            )
    return [band, *(cut(line, width) for line in wrap(parts, width, "   "))]


def table_lines(sequence: Sequence, state: State, width: int, glyphs: Glyphs) -> list[Line]:
    """The block table, `logical → physical`, with tokens and marks, in as many columns as fit, read downwards."""
    table = sequence.row.block_table
    num_columns = max(1, width // _ENTRY_WIDTH)
    num_rows = -(-len(table) // num_columns)
    lines: list[Line] = []
    for at in range(num_rows):
        line: list[Span] = []
        for logical in range(at, len(table), num_rows):
            line += _entry(sequence, state, logical, glyphs)
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


def _entry(sequence: Sequence, state: State, logical: int, glyphs: Glyphs) -> list[Span]:
    """`  12 → 0041  16 S  `, padded to the width of a column."""
    pool = state.pool
    block = sequence.row.block_table[logical]
    is_known = block < pool.num_blocks
    held = max(0, min(pool.block_size, sequence.row.num_computed_tokens - logical * pool.block_size))
    num_tokens = pool.fills[block] if is_known and pool.fills else held
    is_shared = is_known and pool.ref_counts[block] > 1
    was_hit = (logical + 1) * pool.block_size <= sequence.row.num_cached_tokens
    tag: Span = (" ", "")
    if is_shared:
        tag = ("S", "shared")
    elif was_hit:
        tag = ("c", "accent")
    elif num_tokens < pool.block_size:
        tag = (glyphs.open_tail, "strong")
    text = f"{logical:4d}{glyphs.arrow if len(glyphs.arrow) > 1 else f' {glyphs.arrow}'} {block:04}"
    spans: list[Span] = [(text, ""), (f"{num_tokens:4d} ", "dim"), tag]
    return [*spans, (" " * max(1, _ENTRY_WIDTH - sum(len(part) for part, _ in spans)), "")]
