"""The help page: keys, what each glyph stands for, and each number's definition with the file that defines it."""

from textwrap import wrap as wrap_words

from pagedd.tui.glyphs import ENDED, SHARED, Glyphs
from pagedd.tui.line import Line, Span

KEYS = (
    ("1 2 3 4 5", "overview, blocks, requests, prefixes, events"),
    ("arrows, j, ^n ^p, g G", "move; h l too, and k where it does not cancel (blocks, prefixes, events)"),
    ("tab", "from one panel to the next"),
    ("⏎", "open the request or the event, or fold the prefix"),
    ("k", "cancel the request (asks first; the service owner's right)"),
    ("+ -", "change its priority (asks first; the service owner's right)"),
    ("s S", "sort by the next column, turn the order around; or click on a column"),
    ("/", "filter: every word must occur; esc clears it"),
    ("z", "blocks: one cell a block, or the whole pool at once"),
    ("e", "prefixes: evict (asks first; the service owner's right)"),
    ("f", "events: the next kind"),
    ("p", "pause the picture; the daemon goes on"),
    ("r", "record to a file here, until r again; pagetop --replay FILE shows it"),
    ("t", "the next theme"),
    (":", "commands, by name"),
    ("? q", "this page; leave"),
)

DEFINITIONS = (
    ("used", "blocks that at least one live sequence names / all blocks", "engine/stats.py"),
    ("cached", "blocks of no live sequence whose content is kept for reuse / all blocks", "engine/stats.py"),
    ("free", "blocks with nothing worth keeping / all blocks", "engine/stats.py"),
    ("slot fill", "live tokens / (used blocks × block size); a shared block's tokens count once", "engine/stats.py"),
    ("fragmentation", "1 − slot fill", "engine/stats.py"),
    ("contiguous", "what a slab of max_model_len tokens a sequence would waste for the same tokens", "engine/stats.py"),
    ("prefix hits", "cached tokens / looked-up prompt tokens, once per request, since the start", "engine/stats.py"),
    (
        "as 16 bits",
        "predictions over the cache's form that agree with those over 16 bits, when loaded",
        "engine/kv/quality.py",
    ),
    ("evicted", "cached blocks a second whose content was given up for other tokens", "engine/stats.py"),
    ("seats", "sequences that run / max_num_seqs", "engine/stats.py"),
    ("tokens", "tokens of the last step / max_num_batched_tokens", "engine/stats.py"),
    ("waiting", "sequences without a seat, and since when the oldest waits", "engine/stats.py"),
    ("steps", "batches through the model a second", "engine/stats.py"),
    ("out, in", "drawn and computed prompt tokens a second: change of the counters over 1 s", "tui/state.py"),
    ("first token", "from a request's arrival to its first token; half (p50) and 95 % are below", "daemon/metrics.py"),
    ("gap", "between two tokens of a request; half (p50) and 99 % are below", "daemon/metrics.py"),
    ("energy", "joules of the work / its tokens, prompt and output, in the last minute", "daemon/cost.py"),
    ("per M", "what a million prompt tokens / a million output tokens cost, in the last minute", "daemon/cost.py"),
    ("cpu, util, mem", "of the whole machine or card, as psutil and NVML tell", "daemon/telemetry.py"),
    ("tok/s", "a sequence's drawn tokens a second, over 2 s", "tui/state.py"),
    ("wasted slots", "room in a sequence's blocks that no token fills yet", "tui/renderables/detail.py"),
    ("hits", "how often a cached prefix was used again", "engine/kv/prefix_cache.py"),
)


def glyph_legend(glyphs: Glyphs) -> list[tuple[Span, str]]:
    return [
        (("a b c", "own1"), "used by the sequence with that letter in the list of requests"),
        ((glyphs.many, "own5"), "used by a sequence beyond those with letters"),
        ((SHARED, "shared"), "used by several sequences"),
        ((ENDED, "ended"), "used by a sequence that has just ended"),
        (("".join(dict.fromkeys(glyphs.cached)), "cached0"), "cached; the fainter, the longer ago it was used"),
        ((glyphs.free, "free"), "free"),
        (("_", "strong"), "underlined: the block has room left"),
        ((glyphs.level.strip(), "own3"), "a run of blocks: the share in use, in the hue of who has most of them"),
        ((glyphs.queued + glyphs.prefill + glyphs.decode + glyphs.preempted, ""), "queued, prefill, decode, preempted"),
        ((glyphs.live + " " + glyphs.lost, ""), "the daemon is there; it is not, and all is as it was last"),
        ((glyphs.missing, "dim"), "not available"),
    ]


def help_lines(width: int, glyphs: Glyphs) -> list[Line]:
    lines: list[Line] = [[("Keys", "title")]]
    for keys, meaning in KEYS:
        keys = keys if glyphs.is_unicode else keys.replace("⏎", "enter")
        lines += _entry((keys, "key"), meaning, 24, width)
    lines += [[], [("Glyphs", "title")]]
    for glyph, meaning in glyph_legend(glyphs):
        lines += _entry(glyph, meaning, 24, width)
    lines += [[], [("Numbers", "title"), ("  and the file that defines each", "dim")]]
    for name, meaning, file in DEFINITIONS:
        lines += _entry((name, "strong"), meaning if glyphs.is_unicode else _ascii(meaning), 24, width, file)
    return lines


def _ascii(text: str) -> str:
    return text.replace("×", "x").replace("−", "-")


def _entry(name: Span, meaning: str, indent: int, width: int, file: str = "") -> list[Line]:
    """`name` in a column of its own and the meaning beside it; on a narrow screen below it."""
    is_narrow = width < 60
    room = max(10, width - (4 if is_narrow else indent + 2))
    words = wrap_words(meaning, room)
    if file and (not words or len(words[-1]) + 2 + len(file) > room):
        words.append("")
    lines: list[list[Span]] = [
        [("    " if is_narrow else " " * (indent + 2), ""), (text, "")] for text in (words or [""])
    ]
    if file:
        lines[-1].append((f"  {file}" if words[-1] else file, "dim"))
    if is_narrow:
        return [[("  ", ""), name], *lines]
    lines[0][0] = ("  ", "")
    lines[0].insert(1, name)
    lines[0].insert(2, (" " * max(1, indent - len(name[0])), ""))
    return list(lines)
