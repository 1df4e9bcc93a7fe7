"""What drawing holds on a card, counted on tensors without numbers: the pool is sized beside it."""

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pagedd.engine import logit_changes, sampler
from pagedd.engine.request import Request
from pagedd.engine.sampler import Sampler, working_bytes_per_logit
from pagedd.engine.sampling_params import SamplingParams
from pagedd.engine.sequence import Sequence
from pagedd.kernels import ops

VOCAB_SIZE, NUM_ROWS = 1 << 16, 8
EVERYTHING = SamplingParams(max_tokens=9, repetition_penalty=1.2, top_k=9, top_p=0.9, min_p=0.1, num_logprobs=5)


class CountedMemory(TorchDispatchMode):
    """Bytes of the tensors that operations make, as long as somebody holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.most_bytes = 0
        self._held: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage._cdata for storage in storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for storage in storages(result):
            if storage._cdata not in given and storage._cdata not in self._held:
                self._held[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._held.pop, storage._cdata)
        self.most_bytes = max(self.most_bytes, sum(self._held.values()))
        return result


def storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def sequence_of(params: SamplingParams) -> Sequence:
    return Sequence(
        request=Request(request_id="r", prompt_token_ids=[1], params=params),
        choice_index=0,
        token_ids=[1, 2],
        num_prompt_tokens=1,
        arrival_s=0.0,
        due_s=0.0,
        order=0,
        priority=0,
    )


@pytest.mark.parametrize(
    "others", [[EVERYTHING], [SamplingParams(max_tokens=9)], [SamplingParams(max_tokens=9, temperature=0)]], ids=str
)
def test_a_card_draws_in_what_is_reserved_for_it_and_not_in_much_less(
    others: list[SamplingParams], monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_numbers(arrays: list[Any], device: torch.device) -> list[torch.Tensor]:
        return [torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in arrays]

    for module in (sampler, logit_changes):
        monkeypatch.setattr(module, "to_device", without_numbers)
    monkeypatch.setattr(ops, "keep_best", lambda *tensors: None)  # as Triton's, which has no workspace
    sequences = [sequence_of(params) for params in [EVERYTHING] * (NUM_ROWS - 1) + others]
    logits = torch.empty(NUM_ROWS, VOCAB_SIZE, device="meta")
    with CountedMemory() as memory:
        Sampler().draw(logits, sequences)
    copied_for_forks = 4
    reserved = working_bytes_per_logit(sorts_logits=False) - copied_for_forks
    assert 0.7 * reserved < memory.most_bytes / logits.numel() <= reserved
