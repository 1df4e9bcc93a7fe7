"""Which page holds the 16-bit keys of which block that is not full yet, where the cache quantizes whole blocks.

A block gets a page when a step first writes to it, keeps it while guesses may still be taken back, and gives it up when
it is full for good or nobody names it any more. A step's device work runs in order, so a page may be handed on at once.
Plain Python, no tensors: the bytes are in `storage.py`; why there are open keys is in `kernels/kv_form.py`.
"""

from pagedd.engine.errors import IntegrityError


class OpenPages:
    """Pages by block.

    At a launch a batch opens those of the blocks it writes to, and the copy of an open block one for its target.
    `BlockManager` closes; the runner does so for its own steps before serving.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._pages: dict[int, int] = {}
        self._free = list(range(num_pages))
        self._closed: set[int] = set()

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free)

    def find(self, block_id: int) -> int | None:
        """The page of a block that has one."""
        return self._pages.get(block_id)

    def open(self, block_id: int) -> int:
        """The page of a block that is about to be written to."""
        self._closed.discard(block_id)
        page = self._pages.get(block_id)
        if page is None:
            if not self._free:
                raise IntegrityError(f"all {self.num_pages} pages of open blocks are taken")
            page = self._pages[block_id] = self._free.pop()
        return page

    def close(self, block_id: int) -> None:
        """The block is full, or nobody's; `settle` makes it so."""
        if block_id in self._pages:
            self._closed.add(block_id)

    def settle(self) -> None:
        """Frees what was closed. After copies are made: a fork's tail may be closed since the copy was asked for."""
        for block_id in self._closed:
            self._free.append(self._pages.pop(block_id))
        self._closed.clear()


def num_pages_for(
    num_batched_tokens: int, block_size: int, max_num_seqs: int, *, num_guesses: int, runs_ahead: bool
) -> int:
    """As many as can ever be open.

    n tokens of one sequence touch at most n // block_size + 2 blocks, in each of the steps that are on their way; and
    guesses that were refused leave blocks behind.
    """
    num_steps = 2 if runs_ahead else 1
    num_left_behind = -(-num_guesses // block_size)
    return num_steps * (num_batched_tokens // block_size) + (2 * num_steps + num_left_behind) * max_num_seqs
