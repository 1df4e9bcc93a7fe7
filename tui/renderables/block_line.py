"""One block in words: who holds it, which of their blocks it is, how full it is, and what the daemon knows besides."""

from pagedd.client.protocol import BlockDetail
from pagedd.tui.glyphs import Glyphs
from pagedd.tui.line import Line, Span, join, printable
from pagedd.tui.pool import CACHED, FREE, NUM_AGES
from pagedd.tui.renderables import numbers
from pagedd.tui.renderables.requests import mark
from pagedd.tui.state import State

_MAX_OWNERS = 6
_DIGEST_CHARACTERS = 8


def block_line(state: State, block: int, detail: BlockDetail | None, glyphs: Glyphs) -> Line:
    """What the frame says of a block, and of `detail` what only the daemon knows; None while it has not answered."""
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
    return join(parts, (glyphs.separator, "faint"))


def block_text(detail: BlockDetail | None, glyphs: Glyphs) -> Line:
    """The tokens of a block as text, for those who may see it."""
    if detail is None or not detail.text:
        return []
    return [("tokens ", "dim"), (printable(detail.text.replace("\n", "⏎" if glyphs.is_unicode else " ")), "")]


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
