"""The prefix cache as a tree: what prompts have in common, how much of the pool it holds, and how often it was hit."""

from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise

from rich.cells import cell_len

from pagedd.client.questions import PrefixNode
from pagedd.tui.glyphs import Glyphs
from pagedd.tui.line import Line, Span, fit, printable
from pagedd.tui.renderables import numbers

# (name, width, narrowest screen that has it): in narrow ones the words are what is read, and tokens say what blocks do.
_COLUMNS = (("tokens", 7, 0), ("blocks", 6, 110), ("pool", 7, 60), ("hits", 6, 0), ("age", 9, 90), ("who", 8, 90))
_GAP = "  "
# Of what tells a prefix from its siblings at least so much is in sight.
_LEAST_DIFFERENCE = 16


@dataclass(frozen=True, slots=True)
class Branch:
    """A node where the tree shows it. `guides` draws the way to it; blocks and tokens count everything below it too.

    `num_common` first characters of its text are those of a sibling, up to the word in which they begin to differ.
    """

    node: PrefixNode
    guides: str
    num_blocks: int
    num_tokens: int
    has_children: bool
    is_folded: bool
    num_common: int = 0


def branches(nodes: list[PrefixNode], folded: Collection[str], glyphs: Glyphs) -> list[Branch]:
    """The tree from the top down, the largest branch first; what is below a folded node is left out.

    A node whose parent is not among `nodes` (the daemon sends no more than a limit) stands at the top.
    """
    known = {node.digest for node in nodes}
    children: dict[str, list[PrefixNode]] = {}
    for node in nodes:
        parent = node.parent if node.parent in known and node.parent != node.digest else ""
        children.setdefault(parent, []).append(node)
    sizes: dict[str, int] = {}
    tokens: dict[str, int] = {}
    # Children have a greater depth than their parent, so one pass from the deepest adds everything up.
    for node in sorted(nodes, key=lambda node: -node.depth):
        sizes[node.digest] = node.num_blocks + sum(
            sizes.get(child.digest, child.num_blocks) for child in children.get(node.digest, [])
        )
        tokens[node.digest] = node.num_tokens + sum(
            tokens.get(child.digest, child.num_tokens) for child in children.get(node.digest, [])
        )
    common = {digest: num for group in children.values() for digest, num in _common(group).items()}
    shown: list[Branch] = []
    # (node, guides of its line, guides of the lines below it); a stack, for a tree may be deep
    waiting = [(node, "", "") for node in _largest_first(children.get("", []), sizes)][::-1]
    while waiting:
        node, guides, below = waiting.pop()
        own = _largest_first(children.get(node.digest, []), sizes)
        is_folded = bool(own) and node.digest in folded
        num_common = common.get(node.digest, 0)
        shown.append(Branch(node, guides, sizes[node.digest], tokens[node.digest], bool(own), is_folded, num_common))
        if not is_folded:
            last = len(own) - 1
            waiting += [
                (
                    child,
                    below + (glyphs.last_branch if position == last else glyphs.branch),
                    below + ("  " if position == last else glyphs.trunk),
                )
                for position, child in enumerate(own)
            ][::-1]
    return shown


def _common(siblings: list[PrefixNode]) -> dict[str, int]:
    """How many first characters each shares with the sibling that is most like it, whole words only."""
    texts = sorted((printable(node.text), node.digest) for node in siblings if node.text)
    common: dict[str, int] = {}
    for (text, digest), (other_text, other) in pairwise(texts):
        differ_at = next((at for at, (one, two) in enumerate(zip(text, other_text, strict=False)) if one != two), None)
        if differ_at is None:
            continue  # one goes on where the other ends, or they are two callers' with the same words
        num_common = text[:differ_at].rfind(" ") + 1
        for key in (digest, other):
            common[key] = max(common.get(key, 0), num_common)
    return common


def _largest_first(nodes: list[PrefixNode], sizes: dict[str, int]) -> list[PrefixNode]:
    return sorted(nodes, key=lambda node: (-sizes[node.digest], node.digest))


def prefix_header(width: int) -> Line:
    columns = _columns(width)
    room = _room(columns, width)
    return [
        (fit("first words", room), "dim"),
        *((_GAP + (name.ljust(column) if name == "who" else name.rjust(column)), "dim") for name, column in columns),
    ]


def prefix_line(branch: Branch, pool_blocks: int, width: int, glyphs: Glyphs) -> Line:
    """One node in exactly `width` cells."""
    node, missing = branch.node, glyphs.missing
    columns = _columns(width)
    cells: dict[str, Span] = {
        "tokens": (numbers.count(branch.num_tokens, 7, missing), ""),
        "blocks": (numbers.count(branch.num_blocks, 6, missing), ""),
        "pool": (numbers.percent(branch.num_blocks / pool_blocks if pool_blocks else None, missing), ""),
        "hits": (numbers.count(node.num_hits, 6, missing), "accent" if node.num_hits else "dim"),
        "age": (numbers.duration(node.age_s, missing), "dim"),
        "who": (fit(printable(node.user or missing), 8, glyphs.ellipsis), "dim"),
    }
    fold = (glyphs.selected if branch.is_folded else glyphs.down) if branch.has_children else " "
    lead = f"{branch.guides}{fold} "
    room = _room(columns, width)
    lead = lead[-room:] if len(lead) > room else lead
    line: list[Span] = [(lead, "faint"), *_words(branch, room - len(lead), glyphs)]
    for name, column in columns:
        value, role = cells[name]
        line.append((_GAP + value.rjust(column), role))
    return line


def evict_question(branch: Branch) -> str:
    below = " and all below it" if branch.has_children else ""
    return f"Evict {blocks_in_words(branch.num_blocks)}: this prefix{below}?"


def evict_lines(branch: Branch, glyphs: Glyphs) -> list[Line]:
    """What would go, and what of it stays."""
    node = branch.node
    quote = "“”" if glyphs.is_unicode else '""'
    words = f"{quote[0]}{printable(node.text)}{quote[1]}" if node.text else f"{node.digest[:8]}{glyphs.ellipsis}"
    stays = {"used": "in use now: what live requests use stays", "mixed": "its beginning is in use now, and stays"}
    return [
        [(words, "")],
        [
            (f"of {printable(node.user)}" if node.user else "of all callers", ""),
            (f", hit {node.num_hits} times, used {numbers.duration(node.age_s)} ago", "dim"),
        ],
        [(stays.get(node.state, "nobody uses it now"), "dim")],
    ]


def evicted_words(num_blocks: int, num_kept: int, num_left_on_disk: int = 0) -> str:
    """What came of it."""
    left = f"; {blocks_in_words(num_left_on_disk)} stay on the disk" if num_left_on_disk else ""
    kept = f"; {blocks_in_words(num_kept)} in use and kept" if num_kept else ""
    return f"{blocks_in_words(num_blocks)} evicted{kept}{left}"


def blocks_in_words(num_blocks: int) -> str:
    return f"{num_blocks} block" if num_blocks == 1 else f"{num_blocks} blocks"


def _words(branch: Branch, room: int, glyphs: Glyphs) -> list[Span]:
    """The text in `room` cells. What siblings have in common is dim, and gives way to what tells them apart."""
    if branch.node.text is None:
        return [(fit(f"{branch.node.digest[:8]}{glyphs.ellipsis}", room), "dim")]
    text = printable(branch.node.text)
    common, own = text[: branch.num_common], text[branch.num_common :]
    if cell_len(common) + min(_LEAST_DIFFERENCE, cell_len(own)) > room:
        common = fit(common, min(cell_len(common), max(0, room - _LEAST_DIFFERENCE)), glyphs.ellipsis)
    return [(common, "dim"), (fit(own, room - cell_len(common), glyphs.ellipsis), "")]


def _columns(width: int) -> list[tuple[str, int]]:
    return [(name, column) for name, column, narrowest in _COLUMNS if width >= narrowest]


def _room(columns: list[tuple[str, int]], width: int) -> int:
    return max(8, width - sum(len(_GAP) + column for _, column in columns))
