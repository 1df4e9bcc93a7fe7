"""The block map in cells: where a block stands, and what its cell shows.

One cell is one block, in physical order and in groups of eight; a pool with more blocks than there are cells has the
same run of blocks in every cell, which then shows how much of the run is used. Knows `pool.py`'s looks, no widget.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from pagedd.client.letters import LETTERS
from pagedd.tui.glyphs import ASCII, UNICODE, Glyphs
from pagedd.tui.glyphs import ENDED as ENDED_GLYPH
from pagedd.tui.glyphs import SHARED as SHARED_GLYPH
from pagedd.tui.letters import NUM_HUES
from pagedd.tui.pool import CACHED, ENDED, NUM_AGES, OWNED, SHARED

GROUP = 8
# A run's cell has a ground of its own, which those of these looks would hide.
_LEAST_IN_SIGHT = 256
_LEVEL_ROLES = {SHARED: "dim", ENDED: "faint"}


def blocks_in_sight(num_blocks: int, extent: int) -> int:
    """How many blocks a map shows of a pool of which only the first `extent` have been in use: these, and some more.

    All the others are free and need no room. The number doubles, so that the map seldom becomes another one.
    """
    in_sight = _LEAST_IN_SIGHT
    while in_sight < extent:
        in_sight *= 2
    return in_sight if 2 * in_sight <= num_blocks else num_blocks


@dataclass(frozen=True, slots=True)
class Grid:
    """`num_columns` cells a row, `per_cell` blocks a cell; labels take `label_width` cells and a space."""

    num_blocks: int
    num_columns: int
    per_cell: int
    label_width: int

    @classmethod
    def fit(cls, num_blocks: int, width: int, height: int) -> "Grid":
        """The grid that shows a whole pool in `width` × `height`, with as few blocks a cell as that needs."""
        label_width = max(4, len(str(max(0, num_blocks - 1))))
        num_columns = GROUP * max(1, (width - label_width) // (GROUP + 1))
        per_cell = max(1, ceil(num_blocks / (num_columns * max(1, height))))
        return cls(num_blocks, num_columns, per_cell, label_width)

    @property
    def num_rows(self) -> int:
        return ceil(self.num_blocks / (self.num_columns * self.per_cell))

    @property
    def blocks_per_row(self) -> int:
        return self.num_columns * self.per_cell

    @property
    def blocks_per_group(self) -> int:
        return GROUP * self.per_cell

    def row_of(self, block: int) -> int:
        return block // self.blocks_per_row

    def cells(self, row: int) -> range:
        """The first block of each cell of a row."""
        start = row * self.blocks_per_row
        return range(start, min(self.num_blocks, start + self.blocks_per_row), self.per_cell)

    def block_at(self, x: int, y: int) -> int | None:
        """The (first) block of the cell at these coordinates; None where no cell is."""
        x -= self.label_width + 1
        if x < 0 or x % (GROUP + 1) == GROUP or y < 0:
            return None
        column = x - x // (GROUP + 1)
        block = y * self.blocks_per_row + column * self.per_cell
        return block if column < self.num_columns and block < self.num_blocks else None


@dataclass(frozen=True, slots=True)
class Cell:
    """A character, its role, and the role of the ground it stands on ("" for the role's own)."""

    glyph: str
    role: str
    ground: str = ""


@lru_cache(maxsize=2)
def block_cells(glyphs: Glyphs) -> list[Cell]:
    """The cell of each look, for a grid with one block a cell."""
    cells = [Cell(glyphs.free, "free")]
    cells += [Cell(glyphs.cached[age], f"cached{age}") for age in range(NUM_AGES)]
    cells += [Cell(SHARED_GLYPH, "shared"), Cell(ENDED_GLYPH, "ended")]
    cells += [
        Cell(LETTERS[number - 1] if number <= len(LETTERS) else glyphs.many, f"own{number % NUM_HUES}")
        for number in range(1, 256 - OWNED)
    ]
    return cells


def run_cell(looks: bytes, is_unicode: bool) -> Cell:
    """The cell of a run of blocks: its height is the share that is used, its hue that of whoever has most of them.

    In ASCII it is the letter of whoever has most, once at least half of the run is used.
    """
    num_blocks = len(looks)
    num_free = looks.count(0)
    num_cached = sum(looks.count(CACHED + age) for age in range(NUM_AGES))
    num_used = num_blocks - num_free - num_cached
    glyphs = UNICODE if is_unicode else ASCII
    if not num_used:
        if num_cached < num_free:
            return block_cells(glyphs)[0]
        age = max(range(NUM_AGES), key=lambda age: looks.count(CACHED + age))
        return block_cells(glyphs)[CACHED + age]
    holder = max((look for look in set(looks) if look >= SHARED), key=lambda look: (looks.count(look), -look))
    cell = block_cells(glyphs)[holder]
    if not is_unicode:
        return cell if 2 * num_used >= num_blocks else Cell(glyphs.level[2], cell.role)
    level = glyphs.level[max(1, round(num_used / num_blocks * (len(glyphs.level) - 1)))]
    return Cell(level, _LEVEL_ROLES.get(holder, cell.role), "ground.cached" if num_cached > num_free else "ground.free")
