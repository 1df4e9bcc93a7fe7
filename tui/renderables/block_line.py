"""A cell of the block map in words. One block: who holds it, which of theirs it is, and what the daemon knows besides;
a run of blocks: how many of them are what, and who holds them.
"""

from pagedd.client.questions import BlockDetail
from pagedd.tui.glyphs import Glyphs
from pagedd.tui.line import Line, Span, fit, join_as_fits, printable
from pagedd.tui.pool import CACHED, FREE, NUM_AGES, SHARED
from pagedd.tui.renderables import numbers
from pagedd.tui.renderables.requests import mark
from pagedd.tui.state import State

_MAX_OWNERS = 6
_DIGEST_CHARACTERS = 8
_LEAST_TEXT = 8


def block_line(state: State, block: int, detail: BlockDetail | None, width: int, glyphs: Glyphs) -> Line:
    """What the frame says of a block, and of `detail` what only the daemon knows; None while it has not answered.

    What does not fit whole into `width` is left out.
    """
    pool = state.pool
    if block >= pool.num_blocks:
        return []
    parts: list[Line] = [[(f"{glyphs.selected} block {block:04}", "accent")], _state(state, block, glyphs)]
    if pool.looks[block] >= CACHED + NUM_AGES:
        parts += _used(state, block)
    if detail is not None:
        if detail.digest:
            parts.append([("hash ", "dim"), (detail.digest[:_DIGEST_CHARACTERS] + glyphs.ellipsis, "")])
        if detail.last_use_s is not None:
            parts.append([("last use ", "dim"), (f"{numbers.duration(detail.last_use_s)} ago", "")])
    return join_as_fits([part for part in parts if part], (glyphs.separator, "faint"), width)


def run_line(state: State, blocks: range, width: int, glyphs: Glyphs) -> Line:
    """What the blocks of one cell are, all together, as far as it fits."""
    pool = state.pool
    looks = pool.looks[blocks.start : blocks.stop]
    if not looks:
        return []
    dash = "–" if glyphs.is_unicode else "-"
    num_free = looks.count(FREE)
    num_cached = sum(looks.count(CACHED + age) for age in range(NUM_AGES))
    num_used = len(looks) - num_free - num_cached
    num_shared = looks.count(SHARED)
    used: list[Span] = [(f"{num_used}", ""), (" used", "dim")]
    holders = state.holders(blocks)
    for position, (sequence, held) in enumerate(holders[:_MAX_OWNERS]):
        used += [(", " if position else ": ", "dim"), mark(sequence, glyphs), (f" {held}", "")]
    if len(holders) > _MAX_OWNERS:
        used.append((f" and {len(holders) - _MAX_OWNERS} more", "dim"))
    parts: list[Line] = [
        [(f"{glyphs.selected} blocks {blocks.start:04}{dash}{blocks.start + len(looks) - 1:04}", "accent")],
        used if num_used else [("none used", "dim")],
        [(f"{num_shared}", ""), (" shared", "dim")] if num_shared else [],
        [(f"{num_cached}", ""), (" cached", "dim")],
        [(f"{num_free}", ""), (" free", "dim")],
    ]
    if num_used and pool.fills:
        fills = pool.fills[blocks.start : blocks.stop]
        filled = sum(fill for fill, look in zip(fills, looks, strict=True) if look >= SHARED)
        share = numbers.whole_percent(filled / (num_used * pool.block_size), glyphs.missing).strip()
        parts.append([(share, ""), (" of its used slots filled", "dim")])
    return join_as_fits([part for part in parts if part], (glyphs.separator, "faint"), width)


def block_text(detail: BlockDetail | None, width: int, glyphs: Glyphs) -> Line:
    """The tokens of a block as text, for those who may see it."""
    label = "tokens "
    if detail is None or not detail.text or width < len(label) + _LEAST_TEXT:
        return []
    text = printable(detail.text.replace("\n", "⏎" if glyphs.is_unicode else " "))
    return [(label, "dim"), (fit(text, width - len(label), glyphs.ellipsis).rstrip(), "")]


def _state(state: State, block: int, glyphs: Glyphs) -> Line:
    look = state.pool.looks[block]
    if look == FREE:
        return [("free", "dim")]
    if look < CACHED + NUM_AGES:
        return [("cached", ""), (", used by nobody now", "dim")]
    owners = state.marks(block)
    if not owners:
        return [("used by a sequence that has just ended", "dim")]
    spans: list[Span] = [("used by ", "dim")]
    for position, (sequence, _) in enumerate(owners[:_MAX_OWNERS]):
        spans += [(", ", "dim")] if position else []
        spans.append(mark(sequence, glyphs))
    if len(owners) > _MAX_OWNERS:
        spans.append((f" and {len(owners) - _MAX_OWNERS} more", "dim"))
    references = state.pool.ref_counts[block]
    if references > 1:
        times = "×" if glyphs.is_unicode else "x"
        spans.append((f" (shared {times}{references})", "strong"))
    return spans


def _used(state: State, block: int) -> list[Line]:
    pool, parts = state.pool, []
    if owners := state.marks(block):
        parts.append([("logical ", "dim"), (str(owners[0][1]), "")])
    if pool.fills:
        parts.append([(f"{pool.fills[block]}/{pool.block_size}", ""), (" slots", "dim")])
    return list(parts)
