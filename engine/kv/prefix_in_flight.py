"""Prefixes that running sequences are computing now: who else begins like that waits for them instead.

An index beside `PrefixCache`, of full blocks that are not written yet: digest → the sequence that will write it. Found
entries are compared token by token, as in the cache. Plain Python; who waits, and how, is the scheduler's business.
"""

from pagedd.engine.kv.block_manager import BlockManager
from pagedd.engine.sequence import Sequence, SequenceState


class PrefixesInFlight:
    """What is being computed by sequences that have a seat."""

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._writers: dict[bytes, Sequence] = {}
        self._digests: dict[Sequence, list[bytes]] = {}  # of each writer

    def add(self, sequence: Sequence) -> None:
        """`sequence` was admitted, and will compute its known tokens from here on."""
        blocks = range(sequence.num_indexed_blocks, sequence.num_tokens // self._blocks.block_size)
        digests = [self._blocks.digest(sequence, i) for i in blocks]
        self._digests[sequence] = [digest for digest in digests if digest not in self._writers]
        self._writers.update(dict.fromkeys(self._digests[sequence], sequence))

    def remove(self, sequence: Sequence) -> None:
        """It has computed them, or lost its seat; nothing for one that is not here."""
        for digest in self._digests.pop(sequence, ()):
            self._writers.pop(digest, None)

    def find(self, sequence: Sequence, num_cached_blocks: int) -> tuple[Sequence, int] | None:
        """Who computes what `sequence` would compute next, and up to which block both are the same.

        Args:
            num_cached_blocks: leading blocks that the cache has already.

        Returns:
            the writer and the end of the run of blocks, or None. At least one token is left to `sequence` itself.
        """
        size, writer, end = self._blocks.block_size, None, num_cached_blocks
        while end < (sequence.num_tokens - 1) // size:
            found = self._writers.get(self._blocks.digest(sequence, end))
            if found is None or found is sequence or (writer is not None and found is not writer):
                break
            tokens = slice(end * size, (end + 1) * size)
            if not self._will_write(found, end) or found.token_ids[tokens] != sequence.token_ids[tokens]:
                break
            writer, end = found, end + 1
        return None if writer is None else (writer, end)

    @staticmethod
    def _will_write(writer: Sequence, block: int) -> bool:
        return writer.state is SequenceState.RUNNING and writer.num_indexed_blocks <= block
