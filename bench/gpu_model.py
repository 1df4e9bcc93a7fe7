"""A random Llama on a card: the engine's rates, beside those of transformers on the same weights.

Weights are transformers' own random ones; the engine takes them as a checkpoint. Text does not matter to speed.
"""

import gc
import time
from collections.abc import Iterator
from typing import Any

import torch

from pagedd.engine.batch import build_batch
from pagedd.engine.config import EngineConfig
from pagedd.engine.create import create_engine
from pagedd.engine.cuda_graphs import Capture, DecodeGraphs, capture_on_gpu
from pagedd.engine.engine import Engine
from pagedd.engine.kv.storage import KVStorage
from pagedd.engine.model.config import parse_decoder_config
from pagedd.engine.model.decoder import Decoder
from pagedd.engine.model.load import LoadedModel
from pagedd.engine.request import Request
from pagedd.engine.sampling_params import SamplingParams
from pagedd.engine.sequence import Sequence
from pagedd.engine.step import ScheduledSequence
from pagedd.kernels import ops
from pagedd.kernels.kv_form import form_of

Figure = tuple[str, float, str, float | None]  # what, value, unit, share of its ceiling

BLOCK_SIZE = 16
NUM_PROMPT_TOKENS = 128
BATCHES = (1, 8, 64, 256)


class StateDict:
    """A model of transformers as a checkpoint."""

    def __init__(self, model: Any) -> None:
        self._tensors = model.state_dict()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def get(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._tensors[name]
        return tensor


def random_llama(device: torch.device, sizes: Any, dtype: torch.dtype, num_layers: int) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama",
        vocab_size=128256 if sizes.hidden > 1000 else 96,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.inner,
        num_hidden_layers=num_layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()  # type: ignore[no-untyped-call]


def load_from(theirs: Any, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    config = parse_decoder_config(theirs.config.to_dict())
    backend = ops.select_backend(device)
    decoder = Decoder(config, StateDict(theirs), dtype, device, lambda share, what: None)
    return LoadedModel(decoder, backend, config, device, dtype)


# --- graphs -----------------------------------------------------------------------------------------------------------


def replayed_steps(device: torch.device, sizes: Any, dtype: torch.dtype) -> Iterator[Figure]:
    """Two layers, decoding: that replays equal eager steps, and the time of each.

    Not to the last bit: a graph is launched for the longest context, whose sums may be split otherwise.
    """
    loaded = load_from(random_llama(device, sizes, dtype, num_layers=2), device, dtype)
    max_num_seqs, num_blocks = 8, 8 * 4
    storage = KVStorage(loaded.config, num_blocks + 1, BLOCK_SIZE, form_of(dtype), device)
    for plane in storage.planes:
        plane.normal_()
    with torch.inference_mode():
        graphs = DecodeGraphs(
            loaded.model,
            storage,
            scratch_block=num_blocks,
            max_num_seqs=max_num_seqs,
            max_model_len=4 * BLOCK_SIZE,
            device=device,
            capture=_capture(device),
        )
        for num_seqs in (1, 3, 8):
            batch = build_batch(list(_decoding(num_seqs)), BLOCK_SIZE, device)
            before = storage.data.clone()
            eager = loaded.model.forward(batch, storage)
            storage.data.copy_(before)
            torch.testing.assert_close(graphs.run(batch), eager, rtol=2e-2, atol=2e-2)
            yield (
                f"eager, {num_seqs}",
                1e3 * _seconds(device, lambda b=batch: loaded.model.forward(b, storage)),
                "ms",
                None,
            )
            yield f"replayed, {num_seqs}", 1e3 * _seconds(device, lambda b=batch: graphs.run(b)), "ms", None


def _capture(device: torch.device) -> Capture:
    if device.type == "cuda":
        return capture_on_gpu()

    def run_again(forward: Any) -> Any:
        result = forward()
        return lambda: result.copy_(forward())

    return run_again


def _decoding(num_seqs: int) -> Iterator[ScheduledSequence]:
    for i in range(num_seqs):
        length = 20 + 3 * i
        sequence = Sequence(
            request=Request(request_id=str(i), prompt_token_ids=[1], params=SamplingParams(max_tokens=9)),
            choice_index=0,
            token_ids=[(7 * i + j) % 90 for j in range(length)],
            num_prompt_tokens=1,
            arrival_s=0.0,
            due_s=0.0,
            priority=0,
            order=i,
            block_table=[4 * i + j for j in range(4)],
        )
        yield ScheduledSequence(sequence, length - 1, 1, [sequence])


def _seconds(device: torch.device, call: Any, repeats: int = 20) -> float:
    call()
    _synchronize(device)
    started = time.perf_counter()
    for _ in range(repeats if device.type == "cuda" else 1):
        call()
    _synchronize(device)
    return (time.perf_counter() - started) / (repeats if device.type == "cuda" else 1)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- the engine -------------------------------------------------------------------------------------------------------


def engine_rates(device: torch.device, sizes: Any, dtype: torch.dtype, copy_rate: float | None) -> Iterator[Figure]:
    """Tokens a second of both; at batch 1 the share of what the weights' bytes allow."""
    is_full = device.type == "cuda" and sizes.hidden > 1000
    theirs = random_llama(device, sizes, dtype, num_layers=32 if is_full else 2)
    num_steps = 64 if is_full else 3
    batches, their_rates = BATCHES if is_full else BATCHES[:1], dict[int, float]()
    for batch in batches:
        their_rates[batch] = _their_decode(theirs, device, batch, num_steps)
        yield f"transformers, decode, batch {batch}", their_rates[batch], "tokens/s", None
    yield "transformers, prefill", _their_prefill(theirs, device, sizes.chunk), "tokens/s", None

    loaded = load_from(theirs, device, dtype)
    del theirs
    gc.collect()
    config = EngineConfig(
        model="random",
        num_blocks=(max(BATCHES) * 16 + sizes.chunk // BLOCK_SIZE) if is_full else 64,
        max_num_seqs=max(BATCHES) if is_full else 4,
        max_num_batched_tokens=sizes.chunk,
        max_model_len=8192,
        num_speculative_tokens=0,
        enable_prefix_caching=False,
    )
    engine, _ = create_engine(config, lambda share, what: None, load=lambda config, progress: loaded)
    for batch in batches:
        rate = _decode(engine, batch, num_steps)
        floor = None if copy_rate is None else copy_rate / loaded.model.weight_bytes
        share = None if floor is None or batch > 1 else rate / floor
        yield f"pagedd, decode, batch {batch}", rate, "tokens/s", share
        yield f"times transformers, batch {batch}", rate / their_rates[batch], "", None
    yield "pagedd, prefill", _prefill(engine, sizes.chunk), "tokens/s", None


def _decode(engine: Engine, batch: int, num_steps: int) -> float:
    """All sequences decode before the clock starts, and none ends while it runs."""
    _add(engine, batch, NUM_PROMPT_TOKENS if num_steps > 3 else 8, max_tokens=4 * num_steps + 64)
    while len(engine.step()) < batch or engine.stats().num_scheduled_tokens != batch:
        pass
    for _ in range(num_steps // 2):
        engine.step()
    started, num_tokens = time.perf_counter(), 0
    for _ in range(num_steps):
        num_tokens += sum(len(output.token_ids) for output in engine.step())
    seconds = time.perf_counter() - started
    _end(engine, batch)
    return num_tokens / seconds


def _prefill(engine: Engine, num_tokens: int) -> float:
    started = time.perf_counter()
    _add(engine, 1, num_tokens, max_tokens=1)
    while engine.has_work:
        engine.step()
    return num_tokens / (time.perf_counter() - started)


def _add(engine: Engine, count: int, num_prompt_tokens: int, max_tokens: int) -> None:
    for i in range(count):
        prompt = [(31 * i + j) % 90 for j in range(num_prompt_tokens)]
        params = SamplingParams(max_tokens=max_tokens, temperature=0)
        engine.add(Request(request_id=str(i), prompt_token_ids=prompt, params=params))


def _end(engine: Engine, count: int) -> None:
    for i in range(count):
        engine.abort(str(i))
    while engine.has_work:
        engine.step()


# --- transformers -----------------------------------------------------------------------------------------------------


@torch.inference_mode()
def _their_decode(model: Any, device: torch.device, batch: int, num_steps: int) -> float:
    from transformers import StaticCache

    num_prompt_tokens = NUM_PROMPT_TOKENS if num_steps > 3 else 8
    cache = StaticCache(config=model.config, max_cache_len=num_prompt_tokens + num_steps + 8)
    token_ids = torch.randint(90, (batch, num_prompt_tokens), device=device)
    token_ids = model(token_ids, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
    for _ in range(4):
        token_ids = model(token_ids, past_key_values=cache, use_cache=True).logits.argmax(-1)
    _synchronize(device)
    started = time.perf_counter()
    for _ in range(num_steps):
        token_ids = model(token_ids, past_key_values=cache, use_cache=True).logits.argmax(-1)
    _synchronize(device)
    return batch * num_steps / (time.perf_counter() - started)


@torch.inference_mode()
def _their_prefill(model: Any, device: torch.device, num_tokens: int) -> float:
    token_ids = torch.randint(90, (1, num_tokens), device=device)
    return num_tokens / _seconds(device, lambda: model(token_ids, logits_to_keep=1), repeats=3)
