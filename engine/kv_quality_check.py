"""What a quantized KV cache costs in quality, measured at load: one text over it, and over a cache in 16 bits.

Both see the same weights, the same kernels and the same chunks, so that only the cache differs. Owns the measurement
and what follows of it. Which text it is, and its ids, are the caller's; how good is good enough, `kv/quality.py`'s.
"""

import dataclasses
import logging
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from pagedd.engine.batch import build_batch
from pagedd.engine.errors import EngineError
from pagedd.engine.kv.quality import LARGER_FORM, KVQuality
from pagedd.engine.kv.storage import KVStorage
from pagedd.engine.model.config import ModelConfig
from pagedd.engine.model.load import Model
from pagedd.engine.request import Request
from pagedd.engine.sampling_params import SamplingParams
from pagedd.engine.sequence import Sequence as EngineSequence
from pagedd.engine.step import ScheduledSequence
from pagedd.kernels.kv_form import FORMS, KVForm

log = logging.getLogger(__name__)

# Of the text, at most: a share near 0.95 of so many is known to a hundredth, in two seconds on two slow cores.
MAX_TOKENS = 768
# Rows whose logits are held at once, twice: as many as the sampler has memory for.
_MAX_ROWS = 64


def reference_form(kv_forms: frozenset[str]) -> KVForm:
    """What the cache is compared with, of the forms that the model runs over."""
    return FORMS["bf16" if "bf16" in kv_forms else "fp16"]


def check_kv_quality(
    model: Model, storage: KVStorage, config: ModelConfig, token_ids: Sequence[int], *, max_rows: int
) -> KVQuality:
    """Runs the text over `storage`, in its first blocks, which are nobody's yet, and over a cache made for it.

    Args:
        token_ids: of the text, no longer than `storage` and the model's context.
        max_rows: of logits in one step.
    """
    size, device = storage.block_size, storage.data.device
    reference = KVStorage(config, -(-len(token_ids) // size), size, reference_form(model.kv_forms), device)
    num_agreed, divergence = 0, 0.0
    num_rows = min(_MAX_ROWS, max_rows)
    pairs = zip(
        text_logits(model, storage, token_ids, num_rows),
        text_logits(model, reference, token_ids, num_rows),
        strict=True,
    )
    for ours, theirs in pairs:
        num_agreed += int((ours.argmax(dim=-1) == theirs.argmax(dim=-1)).sum())
        divergence += _divergence(ours, theirs)
    num_tokens = len(token_ids)
    return KVQuality(
        form=storage.form.name,
        agreement=num_agreed / num_tokens,
        divergence_nats=divergence / num_tokens,
        num_tokens=num_tokens,
    )


def judge(quality: KVQuality, reaction: str) -> None:
    """Says what was found. `reaction` to what is not good enough: `warn` or `refuse`.

    Raises:
        EngineError: `poor_kv_quality`, by `refuse`.
    """
    if quality.is_good:
        log.info("KV cache: %s", quality.describe())
        return
    advice = f"use --kv-cache-dtype {LARGER_FORM[quality.form]}"
    if reaction == "refuse":
        raise EngineError(
            "poor_kv_quality", f"{quality.describe()}; {advice}, or serve all the same with --kv-quality-check warn"
        )
    log.warning("KV cache: %s; %s", quality.describe(), advice)


@torch.inference_mode()
def text_logits(model: Model, storage: KVStorage, token_ids: Sequence[int], num_rows: int) -> Iterator[torch.Tensor]:
    """Logits of every position, [rows, vocab_size] float32 of each chunk of `num_rows` tokens.

    Keys and values go into the first blocks of `storage`; no page stays open.
    """
    sequence = _sequence(list(token_ids), storage.block_size)
    pages = storage.open_pages
    for start in range(0, len(token_ids), num_rows):
        end = min(start + num_rows, len(token_ids))
        batch = build_batch(
            [ScheduledSequence(sequence, start, end - start)],
            storage.block_size,
            storage.data.device,
            open_pages=pages if storage.form.has_open_keys else None,
        )
        rows = torch.arange(end - start, device=storage.data.device)
        yield model.forward(dataclasses.replace(batch, logits_rows=rows), storage)
        # Blocks that are full need their pages no more; at the end none does.
        num_done = len(sequence.block_table) if end == len(token_ids) else end // storage.block_size
        for block_id in sequence.block_table[:num_done]:
            pages.close(block_id)
        pages.settle()


def _sequence(token_ids: list[int], block_size: int) -> EngineSequence:
    return EngineSequence(
        request=Request(request_id="quality", prompt_token_ids=token_ids, params=SamplingParams(max_tokens=1)),
        choice_index=0,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        arrival_s=0.0,
        due_s=0.0,
        priority=0,
        order=0,
        block_table=list(range(-(-len(token_ids) // block_size))),
    )


def _divergence(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Of `ours` from `theirs`, both logits [rows, vocab_size]: KL in nats, summed over the rows."""
    return F.kl_div(ours.log_softmax(dim=-1), theirs.log_softmax(dim=-1), reduction="sum", log_target=True).item()
