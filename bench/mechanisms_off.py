"""What systems without a mechanism do, on our own engine: contiguous slabs in place of blocks, static batches in place
of continuous ones. Without prefix caching is a setting of the engine's, and needs nothing here.

Both are as good as their kind can be: slabs are never fragmented among each other, and a static batch pads no prompt.
"""

from collections import deque
from dataclasses import replace

from pagedd.engine.engine import Engine
from pagedd.engine.kv.block_manager import BlockManager
from pagedd.engine.kv.open_pages import OpenPages
from pagedd.engine.request import Request, SequenceOutput
from pagedd.engine.sequence import Sequence
from pagedd.engine.stats import EngineStats


class SlabManager(BlockManager):
    """Every sequence takes a slab of `max_model_len` tokens before it begins, and holds it until its end.

    The scheduler keeps one block for each running sequence in reserve, which a slab never needs: give it `num_slabs`
    blocks more than the slabs have, and it holds exactly so many.
    """

    def __init__(
        self, num_slabs: int, block_size: int, max_model_len: int, open_pages: OpenPages | None = None
    ) -> None:
        self._blocks_per_slab = -(-max_model_len // block_size)
        num_blocks = num_slabs * (self._blocks_per_slab + 1)
        super().__init__(num_blocks, block_size, enable_prefix_caching=False, open_pages=open_pages)

    def num_blocks_for(self, num_tokens: int) -> int:
        return self._blocks_per_slab

    def has_room(self, sequence: Sequence, num_tokens: int) -> bool:
        return len(sequence.block_table) == self._blocks_per_slab


class StaticBatches:
    """An engine's front that fills all seats, computes every row until the longest is done, and then hands out all.

    Rows whose answer is whole go on being computed, as a padded batch does; nobody gets what was not asked for.
    """

    def __init__(self, engine: Engine, num_seats: int) -> None:
        self._engine = engine
        self._num_seats = num_seats
        self._waiting: deque[Request] = deque()
        self._batch: dict[str, tuple[int, list[int]]] = {}  # tokens that were asked for, and those that came

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._batch)

    def add(self, request: Request) -> None:
        self._waiting.append(request)

    def abort(self, request_id: str, choice_index: int | None = None) -> bool:
        self._waiting = deque(request for request in self._waiting if request.request_id != request_id)
        self._batch.pop(request_id, None)
        return self._engine.abort(request_id, choice_index)

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def step(self) -> list[SequenceOutput]:
        """The answers of the whole batch with its last step, nothing before."""
        if not self._batch:
            self._form_batch()
        for output in self._engine.step():
            self._batch[output.request_id][1].extend(output.token_ids)
        if self._engine.has_work:
            return []
        batch, self._batch = self._batch, {}
        return [
            SequenceOutput(request_id=id, choice_index=0, token_ids=ids[:num_asked], finish_reason="length")
            for id, (num_asked, ids) in batch.items()
        ]

    def _form_batch(self) -> None:
        requests = [self._waiting.popleft() for _ in range(min(self._num_seats, len(self._waiting)))]
        longest = max(request.params.max_tokens for request in requests)
        for request in requests:
            self._batch[request.request_id] = (request.params.max_tokens, [])
            self._engine.add(replace(request, params=replace(request.params, max_tokens=longest)))
