"""The prefix cache as a tree: what prompts have in common, how much of the pool it holds, and how often it was hit."""

from collections.abc import Collection
from dataclasses import dataclass

from pagedd.client.protocol import PrefixNode
from pagedd.tui.glyphs import Glyphs
from pagedd.tui.line import Line, Span, fit, printable
from pagedd.tui.renderables import numbers

# (name, width, narrowest screen that has it)
_COLUMNS = (("tokens", 7, 0), ("blocks", 6, 50), ("pool", 6, 60), ("hits", 6, 0), ("age", 9, 70), ("who", 8, 90))
_GAP = "  "


@dataclass(frozen=True, slots=True)
class Branch:
    """A node where the tree shows it. `guides` draws the way to it; `num_blocks` counts everything below it too."""

    node: PrefixNode
    guides: str
    num_blocks: int
    has_children: bool
    is_folded: bool


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
    # Children have a greater depth than their parent, so one pass from the deepest adds everything up.
    for node in sorted(nodes, key=lambda node: -node.depth):
        sizes[node.digest] = node.num_blocks + sum(
            sizes.get(child.digest, child.num_blocks) for child in children.get(node.digest, [])
        )
    shown: list[Branch] = []
    # (node, guides of its line, guides of the lines below it); a stack, for a tree may be deep
    waiting = [(node, "", "") for node in _largest_first(children.get("", []), sizes)][::-1]
    while waiting:
        node, guides, below = waiting.pop()
        own = _largest_first(children.get(node.digest, []), sizes)
        is_folded = bool(own) and node.digest in folded
        shown.append(Branch(node, guides, sizes[node.digest], bool(own), is_folded))
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
        "tokens": (numbers.count(node.num_tokens, 7, missing), ""),
        "blocks": (numbers.count(branch.num_blocks, 6, missing), ""),
        "pool": (numbers.decimal(100 * branch.num_blocks / pool_blocks if pool_blocks else None, 4, 1, missing), ""),
        "hits": (numbers.count(node.num_hits, 6, missing), "accent" if node.num_hits else "dim"),
        "age": (numbers.duration(node.age_s, missing), "dim"),
        "who": (fit(printable(node.user or missing), 8, glyphs.ellipsis), "dim"),
    }
    fold = (glyphs.selected if branch.is_folded else glyphs.down) if branch.has_children else " "
    lead = f"{branch.guides}{fold} "
    room = _room(columns, width)
    lead = lead[-room:] if len(lead) > room else lead
    text = fit(_words(node, glyphs), room - len(lead), glyphs.ellipsis)
    line: list[Span] = [(lead, "faint"), (text, "" if node.text is not None else "dim")]
    for name, column in columns:
        value, role = cells[name]
        unit = " %" if name == "pool" else ""
        line += [(_GAP + (value + unit).rjust(column), role)]
    return line


def _words(node: PrefixNode, glyphs: Glyphs) -> str:
    if node.text is None:
        return f"{node.digest[:8]}{glyphs.ellipsis}"
    return printable(node.text)


def _columns(width: int) -> list[tuple[str, int]]:
    return [(name, column) for name, column, narrowest in _COLUMNS if width >= narrowest]


def _room(columns: list[tuple[str, int]], width: int) -> int:
    return max(8, width - sum(len(_GAP) + column for _, column in columns))
