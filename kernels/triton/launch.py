"""How each kernel is launched on each architecture: the one table, the reason beside each row. Nothing is tuned live.

A kernel asks `launch_for` with the sizes that matter to it and gets the first row that fits. Knows no tensor.
What a row costs in registers and shared memory is read from the cubins ahead of time, on a machine without a card.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from pagedd.kernels.errors import UnfitError
from pagedd.kernels.triton.card import (
    WITH_HIGH_BANDWIDTH,
    WITH_MUCH_SHARED_MEMORY,
    WITH_PRODUCTS_FROM_SHARED_MEMORY,
    WITHOUT_MATRIX_INSTRUCTIONS,
)


@dataclass(frozen=True, slots=True)
class Launch:
    """Of one kernel.

    Attributes:
        tiles: sizes by the name that the kernel gives them.
        num_warps: of one program.
        num_stages: loop iterations whose loads are under way at once, the one that computes included.
    """

    tiles: Mapping[str, int]
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        kernel: its name, as its module asks for it.
        launch: `None` says that there is none.
        reason: why these numbers, in one or two sentences; why there are none.
        archs: compute capabilities such as 90 that the row is for; `None` is all of them.
        limits: size → the largest for which the row holds. The kernel names its sizes when it asks.
    """

    kernel: str
    launch: Launch | None
    reason: str
    archs: frozenset[int] | None = None
    limits: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    def fits(self, kernel: str, arch: int, sizes: Mapping[str, int]) -> bool:
        return (
            kernel == self.kernel
            and (self.archs is None or arch in self.archs)
            and all(sizes[name] <= limit for name, limit in self.limits.items())
        )


# The first row that fits is taken, so narrow ones come before wide ones. Each kernel ends with one for everything, or
# with one that says what has no launch: a model that would need it is refused before it loads (`limits.py`).
TABLE: tuple[Row, ...] = (
    Row(
        "rms_norm",
        Launch({"numbers": 1024}, num_warps=4, num_stages=1),
        "a head's norm: a program of several rows, 8 numbers a thread, so that each load is 16 bytes",
        limits={"size": 1024},
    ),
    Row(
        "rms_norm",
        Launch({"numbers": 1}, num_warps=8, num_stages=1),
        "a row a program; 16 to 32 numbers a thread, several loads of 16 bytes under way",
        limits={"size": 8192},
    ),
    Row(
        "rms_norm",
        Launch({"numbers": 1}, num_warps=16, num_stages=1),
        "at 8 warps a row of 16384 would hold 64 numbers a thread, twice with a residual",
    ),
    Row(
        "silu_and_mul",
        Launch({"columns": 1024}, num_warps=4, num_stages=1),
        "8 numbers a thread are one load of 16 bytes of each half; a row of 14336 is 14 programs",
    ),
    Row(
        "rope_kv",
        Launch({"heads": 8}, num_warps=4, num_stages=1),
        "8 heads of 128 are 8 numbers a thread, one load of 16 bytes; a Llama-8B's token is 6 programs",
    ),
    # Products with quantized weights: `outs` of the result by `groups` of 32 inputs a step; where there are fewer than
    # `programs` a processor, inputs are split, but not below `steps` a program. Asked with the `rows` of x, and whether
    # scales are nested.
    Row(
        "linear.vector",
        Launch({"outs": 8, "groups": 32, "programs": 2, "steps": 2}, num_warps=4, num_stages=3),
        "a warp reads 512 bytes of a row at once; 8 outs are 512 programs for 4096, so that little has to be split",
        limits={"rows": 1},
    ),
    Row(
        "linear.vector",
        Launch({"outs": 4, "groups": 32, "programs": 2, "steps": 2}, num_warps=4, num_stages=3),
        "8 outs of two rows spill on 100",
    ),
    Row(
        "linear.matrix",
        Launch({"rows": 16, "outs": 32, "groups": 1, "programs": 2, "steps": 8}, num_warps=4, num_stages=1),
        "no matrix instructions and no copies ahead: what fits its registers, with room for several programs",
        archs=WITHOUT_MATRIX_INSTRUCTIONS,
        limits={"rows": 16},
    ),
    Row(
        "linear.matrix",
        Launch({"rows": 64, "outs": 64, "groups": 1, "programs": 1, "steps": 16}, num_warps=8, num_stages=1),
        "the same; with the tiles of other cards each thread would spill kilobytes",
        archs=WITHOUT_MATRIX_INSTRUCTIONS,
    ),
    Row(
        "linear.matrix",
        Launch({"rows": 16, "outs": 128, "groups": 4, "programs": 2, "steps": 4}, num_warps=8, num_stages=4),
        "bound by the weight's bytes, 30 KiB of them under way; wide, as x is read from L2 once for so many outs",
        archs=WITH_HIGH_BANDWIDTH,
        limits={"rows": 16, "is_nested": 0},
    ),
    Row(
        "linear.matrix",
        Launch({"rows": 16, "outs": 64, "groups": 4, "programs": 2, "steps": 4}, num_warps=8, num_stages=3),
        "with a third of that bandwidth a processor, and so of what is under way; two programs fit; with nested scales "
        "everywhere, as they spill beside 128 outs",
        limits={"rows": 16},
    ),
    Row(
        "linear.matrix",
        Launch({"rows": 64, "outs": 64, "groups": 2, "programs": 1, "steps": 8}, num_warps=4, num_stages=4),
        "still few tiles; a number that was dequantized meets 64 rows",
        limits={"rows": 128, "is_nested": 0},
    ),
    Row(
        "linear.matrix",
        Launch({"rows": 64, "outs": 64, "groups": 2, "programs": 1, "steps": 8}, num_warps=8, num_stages=4),
        "the same; with nested scales 4 warps spill",
        archs=frozenset({120, 121}),
        limits={"rows": 128},
    ),
    Row(
        "linear.matrix",
        Launch({"rows": 64, "outs": 64, "groups": 2, "programs": 1, "steps": 8}, num_warps=4, num_stages=4),
        "the same; elsewhere they do not",
        limits={"rows": 128},
    ),
    Row(
        "linear.matrix",
        Launch({"rows": 128, "outs": 128, "groups": 2, "programs": 1, "steps": 16}, num_warps=8, num_stages=3),
        "bound by the matrix units: a number that was dequantized meets 128 rows; 64 sums a thread leave room for them",
    ),
    Row(
        "linear.sum_splits",
        Launch({"columns": 512}, num_warps=4, num_stages=1),
        "4 sums a thread are one load of 16 bytes a split",
    ),
    Row(
        "top_k_top_p",
        Launch({"chunk": 4096}, num_warps=16, num_stages=1),
        "one program has a row to itself, and with it a processor: many threads, 8 tokens each, two loads of 16 bytes",
    ),
    # Attention: `rows` of queries with all heads of a group, `row_bytes` of a key as it is multiplied, whether the
    # cache `is_quantized`, so that keys pass through registers on their way to the products, and whether it
    # `has_open_keys`: those of blocks that are not full, in 16 bits. The loop's loads come in two steps, entries of the
    # block table before the rows they point to, and share its stages: with 5, keys and values of two tiles are under
    # way while a third is multiplied.
    Row(
        "attention.short",
        Launch({"rows": 16, "keys": 16}, num_warps=4, num_stages=2),
        "no matrix instructions and no copies ahead: what fits its registers",
        archs=WITHOUT_MATRIX_INSTRUCTIONS,
        limits={"rows": 16, "row_bytes": 512, "has_open_keys": 0},
    ),
    Row(
        "attention.short",
        Launch({"rows": 16, "keys": 16}, num_warps=8, num_stages=2),
        "the same; with open keys 4 warps spill",
        archs=WITHOUT_MATRIX_INSTRUCTIONS,
        limits={"rows": 16, "row_bytes": 512},
    ),
    Row(
        "attention.short",
        Launch({"rows": 32, "keys": 16}, num_warps=8, num_stages=2),
        "the same; operands of a product lie in shared memory as float32: 48 KiB of 64 with the longest rows",
        archs=WITHOUT_MATRIX_INSTRUCTIONS,
        limits={"rows": 32, "row_bytes": 512},
    ),
    Row(
        "attention.short",
        Launch({"rows": 64, "keys": 16}, num_warps=8, num_stages=2),
        "the same; 40 KiB",
        archs=WITHOUT_MATRIX_INSTRUCTIONS,
        limits={"rows": 64, "row_bytes": 256},
    ),
    Row(
        "attention.short",
        Launch({"rows": 128, "keys": 16}, num_warps=8, num_stages=2),
        "the same; 40 KiB",
        archs=WITHOUT_MATRIX_INSTRUCTIONS,
        limits={"rows": 128, "row_bytes": 128},
    ),
    Row(
        "attention.short",
        None,
        "64 KiB of shared memory hold no tile",
        archs=WITHOUT_MATRIX_INSTRUCTIONS,
    ),
    Row(
        "attention.short",
        Launch({"rows": 16, "keys": 32}, num_warps=4, num_stages=5),
        "16 rows are the least of a matrix instruction; 38 KiB and 80 registers leave room for several programs",
        limits={"rows": 16, "row_bytes": 256, "has_open_keys": 0},
    ),
    Row(
        "attention.short",
        Launch({"rows": 16, "keys": 32}, num_warps=4, num_stages=5),
        "the same; open keys come in 16 bits beside those in 4, in all 56 KiB",
        archs=WITH_MUCH_SHARED_MEMORY,
        limits={"rows": 16, "row_bytes": 256},
    ),
    Row(
        "attention.short",
        Launch({"rows": 16, "keys": 16}, num_warps=4, num_stages=5),
        "where 56 KiB would leave one program to a processor, and 32 keys spill on 86; 30 KiB leave three",
        limits={"rows": 16, "row_bytes": 256},
    ),
    Row(
        "attention.short",
        Launch({"rows": 32, "keys": 32}, num_warps=4, num_stages=5),
        "several guesses of one sequence, or a group of up to 32 heads",
        limits={"rows": 32, "row_bytes": 256},
    ),
    Row(
        "attention.short",
        Launch({"rows": 16, "keys": 32}, num_warps=4, num_stages=3),
        "long rows: one tile under way, so that shared memory stays the same",
        limits={"rows": 16, "row_bytes": 512, "is_quantized": 0},
    ),
    Row(
        "attention.short",
        Launch({"rows": 16, "keys": 16}, num_warps=4, num_stages=3),
        "quantized: 32 keys spill on 80 to 89",
        limits={"rows": 16, "row_bytes": 512, "has_open_keys": 0},
    ),
    Row(
        "attention.short",
        Launch({"rows": 16, "keys": 32}, num_warps=4, num_stages=3),
        "open keys in 16 bits: 66 KiB leave three programs; 16 keys spill on 90",
        archs=WITH_PRODUCTS_FROM_SHARED_MEMORY,
        limits={"rows": 16, "row_bytes": 512},
    ),
    Row(
        "attention.short",
        Launch({"rows": 16, "keys": 16}, num_warps=4, num_stages=3),
        "elsewhere 66 KiB would leave one",
        limits={"rows": 16, "row_bytes": 512},
    ),
    Row(
        "attention.short",
        Launch({"rows": 32, "keys": 16}, num_warps=4, num_stages=3),
        "long rows and many of them: 32 keys spill on their way to shared memory",
        limits={"rows": 32, "row_bytes": 512},
    ),
    Row(
        "attention.short",
        Launch({"rows": 64, "keys": 16}, num_warps=4, num_stages=3),
        "groups of up to 64 heads: few, so what matters is that they fit everywhere",
        limits={"rows": 64, "row_bytes": 512},
    ),
    Row(
        "attention.short",
        Launch({"rows": 128, "keys": 16}, num_warps=8, num_stages=3),
        "groups of up to 128 heads, where one KV head is all that a model has: the same; 97 KiB",
        limits={"rows": 128, "row_bytes": 512},
    ),
    Row(
        "attention.short",
        Launch({"rows": 32, "keys": 16}, num_warps=4, num_stages=3),
        "rows of 1024 bytes: the same; with twice the rows they would take up to 123 KiB",
        limits={"rows": 32, "row_bytes": 1024},
    ),
    Row("attention.short", None, "a tile would not fit the shared memory of every card"),
    Row(
        "attention.chunk",
        Launch({"rows": 32, "keys": 16}, num_warps=4, num_stages=2),
        "no matrix instructions and no copies ahead: what fits its registers",
        archs=WITHOUT_MATRIX_INSTRUCTIONS,
        limits={"group": 32, "row_bytes": 256, "has_open_keys": 0},
    ),
    Row(
        "attention.chunk",
        Launch({"rows": 32, "keys": 16}, num_warps=8, num_stages=2),
        "the same; with rows of 512 bytes 4 warps spill",
        archs=WITHOUT_MATRIX_INSTRUCTIONS,
        limits={"group": 32, "row_bytes": 512, "has_open_keys": 0},
    ),
    Row(
        "attention.chunk",
        Launch({"rows": 32, "keys": 16}, num_warps=8, num_stages=2),
        "the same; with open keys, too",
        archs=WITHOUT_MATRIX_INSTRUCTIONS,
        limits={"group": 32, "row_bytes": 256},
    ),
    Row(
        "attention.chunk",
        Launch({"rows": 16, "keys": 16}, num_warps=8, num_stages=2),
        "both: 200 bytes spill, and 1432 with 32 rows; less than 16 is no tile",
        archs=WITHOUT_MATRIX_INSTRUCTIONS,
        limits={"group": 16, "row_bytes": 512},
    ),
    Row(
        "attention.chunk",
        Launch({"rows": 32, "keys": 16}, num_warps=8, num_stages=2),
        "groups that 16 rows do not hold",
        archs=WITHOUT_MATRIX_INSTRUCTIONS,
        limits={"group": 32, "row_bytes": 512},
    ),
    Row(
        "attention.chunk",
        Launch({"rows": 64, "keys": 16}, num_warps=8, num_stages=2),
        "the same, and its shared memory, as above",
        archs=WITHOUT_MATRIX_INSTRUCTIONS,
        limits={"group": 64, "row_bytes": 256},
    ),
    Row(
        "attention.chunk",
        Launch({"rows": 128, "keys": 16}, num_warps=8, num_stages=2),
        "the same",
        archs=WITHOUT_MATRIX_INSTRUCTIONS,
        limits={"group": 128, "row_bytes": 128},
    ),
    Row(
        "attention.chunk",
        None,
        "64 KiB of shared memory hold no tile",
        archs=WITHOUT_MATRIX_INSTRUCTIONS,
    ),
    Row(
        "attention.chunk",
        Launch({"rows": 128, "keys": 64}, num_warps=8, num_stages=5),
        "products read keys from shared memory, not from registers, so 64 fit beside 64 sums a thread; 131 KiB",
        archs=WITH_PRODUCTS_FROM_SHARED_MEMORY,
        limits={"group": 128, "row_bytes": 256},
    ),
    Row(
        "attention.chunk",
        Launch({"rows": 128, "keys": 32}, num_warps=8, num_stages=5),
        "a warp holds all keys of the tile in registers: 64 of them spill beside 64 sums a thread; 66 KiB",
        limits={"group": 128, "row_bytes": 256, "is_quantized": 0},
    ),
    Row(
        "attention.chunk",
        Launch({"rows": 128, "keys": 16}, num_warps=8, num_stages=5),
        "the same, and 32 keys spill beside the numbers on their way to shared memory",
        limits={"group": 128, "row_bytes": 256},
    ),
    Row(
        "attention.chunk",
        Launch({"rows": 64, "keys": 32}, num_warps=8, num_stages=3),
        "long rows: half as many, for registers and shared memory",
        archs=WITH_PRODUCTS_FROM_SHARED_MEMORY,
        limits={"group": 64, "row_bytes": 512},
    ),
    Row(
        "attention.chunk",
        Launch({"rows": 64, "keys": 32}, num_warps=8, num_stages=3),
        "the same; 70 KiB",
        limits={"group": 64, "row_bytes": 512, "is_quantized": 0},
    ),
    # Where a row is longer than a tile is high, all warps have all of its rows, and share out keys, 8 at a time, and
    # columns of the result. So a query takes as many registers a thread as there are rows, whatever the warps.
    Row(
        "attention.chunk",
        Launch({"rows": 32, "keys": 32}, num_warps=4, num_stages=1),
        "quantized: 64 rows spill 600 bytes on 120; 8 keys a warp, so that no score is computed twice; two programs of "
        "34 KiB hide each other's loads, as copies ahead would spill",
        limits={"group": 32, "row_bytes": 512, "has_open_keys": 0},
    ),
    Row(
        "attention.chunk",
        Launch({"rows": 32, "keys": 16}, num_warps=4, num_stages=3),
        "32 open keys would take 64 KiB and leave one program to a processor; 16 of them 46",
        limits={"group": 32, "row_bytes": 512},
    ),
    Row(
        "attention.chunk",
        Launch({"rows": 64, "keys": 16}, num_warps=8, num_stages=3),
        "larger groups: few, so what matters is that they fit everywhere",
        limits={"group": 64, "row_bytes": 512},
    ),
    Row(
        "attention.chunk",
        Launch({"rows": 128, "keys": 16}, num_warps=8, num_stages=3),
        "groups of up to 128 heads: the same; 97 KiB",
        limits={"group": 128, "row_bytes": 512},
    ),
    Row(
        "attention.chunk",
        Launch({"rows": 32, "keys": 16}, num_warps=4, num_stages=3),
        "rows of 1024 bytes: the same",
        limits={"group": 32, "row_bytes": 1024},
    ),
    Row("attention.chunk", None, "a tile would not fit the shared memory of every card"),
)


@functools.cache
def launch_for(kernel: str, arch: int, **sizes: int) -> Launch:
    """The launch of `kernel` on `arch`.

    Raises:
        UnfitError: the table says that there is none.
    """
    for row in TABLE:
        if row.fits(kernel, arch, sizes):
            if row.launch is not None:
                return row.launch
            raise UnfitError(f"{kernel} has no launch on sm_{arch} for {sizes}, as {row.reason}")
    raise LookupError(f"{kernel} is not in the table of kernels/triton/launch.py")
