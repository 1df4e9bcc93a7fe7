"""A random Llama on a card: the engine's rates, beside those of transformers on the same weights.

Weights are transformers' own random ones, and there is one copy of them: transformers is measured first, and then gives
them away. Text does not matter to speed.
"""

import gc
import inspect
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from pagedd.bench.gpu_rows import Row, attempt, row
from pagedd.bench.recorded_launches import capture_by_recording
from pagedd.engine.batch import Batch, build_batch
from pagedd.engine.config import EngineConfig
from pagedd.engine.create import create_engine
from pagedd.engine.cuda_graphs import DecodeGraphs, capture_on_gpu
from pagedd.engine.engine import Engine
from pagedd.engine.kv.open_pages import OpenPages
from pagedd.engine.kv.storage import KVStorage
from pagedd.engine.model.config import parse_decoder_config
from pagedd.engine.model.decoder import Decoder
from pagedd.engine.model.load import LoadedModel, Model
from pagedd.engine.request import Request, SequenceOutput
from pagedd.engine.sampling_params import SamplingParams
from pagedd.engine.sequence import Sequence
from pagedd.engine.step import ScheduledSequence
from pagedd.kernels import ops
from pagedd.kernels.kv_form import FORMS, KVForm, form_of

BLOCK_SIZE = 16
# Both round to 16 bits in every layer, each in its own order; a wrong mask, scale or position is a difference near 1.
MOST_DIFFERENCE = 0.1
MOST_DIFFERENCE_OF_REPLAYS = 0.02  # the same kernels, but for how contexts are cut
PREFILLS = 3  # that are timed, after one that is not


class GivenAway:
    """A model of transformers as a checkpoint. What is taken of it, it has no longer."""

    def __init__(self, model: Any) -> None:
        self._parameters = dict(model.named_parameters())

    def __contains__(self, name: str) -> bool:
        return name in self._parameters

    def get(self, name: str) -> torch.Tensor:
        parameter = self._parameters[name]
        tensor: torch.Tensor = parameter.data
        parameter.data = tensor.new_empty(0)
        return tensor


def random_llama(device: torch.device, sizes: Any, dtype: torch.dtype, num_layers: int) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama",
        vocab_size=sizes.vocab,
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
    """The engine's model on the weights of `theirs`, which is of no use after that."""
    config = parse_decoder_config(theirs.config.to_dict())
    backend = ops.select_backend(device)
    decoder = Decoder(config, GivenAway(theirs), dtype, device, lambda share, what: None)
    return LoadedModel(decoder, backend, config, device, dtype)


# --- graphs -----------------------------------------------------------------------------------------------------------


def replayed_forms(dtype: torch.dtype, *, is_tiny: bool) -> list[KVForm]:
    return [form_of(dtype)] if is_tiny else [form_of(dtype), FORMS["int8"], FORMS["int4"]]


@torch.inference_mode()
def replayed_steps(loaded: LoadedModel, form: KVForm, sizes: Any, lengths: list[int] | None = None) -> Iterator[Row]:
    """Decode steps over one form of the cache: that replays equal eager ones, and the time of each.

    Not to the last bit: a graph is launched for the longest context, whose sums may be split otherwise.

    Raises:
        AssertionError: a row of logits is not the same.
    """
    device = loaded.device
    # Few lengths are a tile's; the longest is cut over programs, as all are in a graph.
    lengths = lengths or ([7, 40, 23] if sizes.is_tiny else [20, 1000, 130, 517, 64, 999, 3, 256])
    sequences = list(random_sequences(lengths))
    num_blocks = sum(len(sequence.block_table) for sequence in sequences)
    storage = KVStorage(loaded.config, num_blocks + 1, BLOCK_SIZE, form, device, num_pages=num_blocks + 1)
    run_chunks(loaded.model, storage, sequences, device)
    graphs = DecodeGraphs(
        loaded.model,
        storage,
        scratch_block=num_blocks,
        max_num_seqs=len(sequences),
        max_model_len=64 if sizes.is_tiny else 8192,
        vocab_size=loaded.config.vocab_size,
        device=device,
        capture=capture_on_gpu() if device.type == "cuda" else capture_by_recording,
    )
    for num_seqs in (len(sequences),) if sizes.is_tiny else (1, 3, len(sequences)):
        batch = last_tokens(storage, sequences[:num_seqs], device)
        eager = loaded.model.forward(batch, storage).clone()
        # Both write the same token's keys and values to the same slots.
        difference = float(((graphs.run(batch) - eager).norm(dim=1) / eager.norm(dim=1)).max())
        name = f"{form.name}, {num_seqs}"
        if not difference <= MOST_DIFFERENCE_OF_REPLAYS:  # NaN too
            raise AssertionError(f"{num_seqs}: replayed logits differ by {difference:.3g} of a row's length")
        yield row(f"difference of replayed, {name}", difference, "of their length")
        yield row(f"eager, {name}", 1e3 * _seconds(device, partial(loaded.model.forward, batch, storage)), "ms")
        yield row(f"replayed, {name}", 1e3 * _seconds(device, partial(graphs.run, batch)), "ms")


def random_sequences(lengths: list[int]) -> Iterator[Sequence]:
    """Each with blocks of its own, the first of them from block 0 on."""
    next_block = 0
    for i, length in enumerate(lengths):
        num_blocks = -(-length // BLOCK_SIZE)
        token_ids = [(31 * i + 7 * j) % 90 for j in range(length)]
        yield Sequence(
            request=Request(request_id=str(i), prompt_token_ids=token_ids, params=SamplingParams(max_tokens=9)),
            choice_index=0,
            token_ids=token_ids,
            num_prompt_tokens=length,
            arrival_s=0.0,
            due_s=0.0,
            priority=0,
            order=i,
            block_table=list(range(next_block, next_block + num_blocks)),
        )
        next_block += num_blocks


def run_chunks(model: Model, storage: KVStorage, sequences: list[Sequence], device: torch.device) -> None:
    """All tokens but the last of each, so that the cache holds what a model writes there."""
    for sequence in sequences:
        chunk = [ScheduledSequence(sequence, 0, len(sequence.token_ids) - 1, [])]
        model.forward(build_batch(chunk, BLOCK_SIZE, device, open_pages=_pages(storage)), storage)


def last_tokens(storage: KVStorage, sequences: list[Sequence], device: torch.device) -> Batch:
    """A decode step of the last token of each."""
    decodes = [ScheduledSequence(sequence, len(sequence.token_ids) - 1, 1, [sequence]) for sequence in sequences]
    return build_batch(decodes, BLOCK_SIZE, device, open_pages=_pages(storage))


def _pages(storage: KVStorage) -> OpenPages | None:
    return storage.open_pages if storage.form.has_open_keys else None


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


def engine_rates(
    device: torch.device, sizes: Any, dtype: torch.dtype, copy_rate: float, decode_rates: dict[tuple[int, int], float]
) -> Iterator[Row]:
    """Tokens a second of both; at batch 1 the share of what the weights' bytes allow. Fills in `decode_rates`.

    Where transformers fails, the engine is measured all the same.

    Raises:
        AssertionError: the logits of the two are not those of the same model.
    """
    asked, sizes = sizes, fitting(sizes, _free_bytes(device), dtype)
    yield row("layers that fit", sizes.layers, f"of {asked.layers}")
    yield row("largest batch that fits", max(sizes.batches), f"of {max(asked.batches)}")
    theirs = random_llama(device, sizes, dtype, num_layers=sizes.layers)
    (sequence,) = random_sequences([sizes.prompt])
    their_logits = _their_logits(theirs, device, sequence.token_ids)
    their_rates: dict[int, float] = {}
    for batch in sizes.batches:
        name = f"transformers, eager, decode, batch {batch}"
        yield from attempt(name, partial(_their_rate, name, theirs, theirs, device, batch, sizes, their_rates))
    yield from attempt("transformers, eager, prefill", partial(_their_prefill, theirs, device, sizes.chunk))

    loaded = load_from(theirs, device, dtype)
    del theirs
    gc.collect()
    difference = _difference(loaded, sequence, their_logits)
    yield row("difference of logits to transformers'", difference, "of their length")
    if not difference <= MOST_DIFFERENCE:  # NaN too
        raise AssertionError(f"logits differ from transformers' by {difference:.3g} of their length")
    widest = max(sizes.batches)
    config = EngineConfig(
        model="random",
        num_blocks=widest * -(-sizes.most_tokens // BLOCK_SIZE) + sizes.chunk // BLOCK_SIZE + 1,
        max_num_seqs=widest,
        max_num_batched_tokens=sizes.chunk,
        max_model_len=8192,
        num_speculative_tokens=0,
        enable_prefix_caching=False,
    )
    engine, _ = create_engine(config, lambda share, what: None, load=lambda config, progress: loaded)
    for batch in sizes.batches:
        rate = decode_rates[sizes.layers, batch] = _decode(engine, batch, sizes)
        share = rate * bytes_of_a_step(loaded.model.weight_bytes, sizes, dtype) / copy_rate if batch == 1 else None
        yield row(f"pagedd, decode, batch {batch}", rate, "tokens/s", share)
        if batch in their_rates:
            yield row(f"times transformers (eager), batch {batch}", rate / their_rates[batch], "")
    yield row("pagedd, prefill", _prefill(engine, device, sizes.chunk), "tokens/s")


def fitting(sizes: Any, free_bytes: int, dtype: torch.dtype) -> Any:
    """As many layers as the memory holds with the second batch, and as large batches; always one of each."""
    item = dtype.itemsize
    layer_bytes = item * sizes.hidden * (3 * sizes.inner + 2 * (sizes.heads + sizes.kv_heads) * sizes.head_dim)
    ends_bytes = item * 2 * sizes.vocab * sizes.hidden
    left = int(0.85 * free_bytes) - ends_bytes - (1 << 30)  # what neither computes with the model may take
    token_bytes = 2 * sizes.kv_heads * sizes.head_dim * item  # in one layer

    def bytes_of_a_layer(batch: int) -> int:
        return int(layer_bytes + (sizes.chunk + batch * sizes.most_tokens) * token_bytes)

    layers = max(1, min(sizes.layers, left // bytes_of_a_layer(sizes.batches[:2][-1])))
    batches = [batch for batch in sizes.batches if layers * bytes_of_a_layer(batch) <= left]
    return replace(sizes, layers=layers, batches=tuple(batches) or sizes.batches[:1])


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 1 << 40


@torch.inference_mode()
def _difference(loaded: LoadedModel, sequence: Sequence, their_logits: torch.Tensor) -> float:
    """Of the engine's logits after the sequence, computed as a chunk and a decode over a cache in 16 bits."""
    storage = KVStorage(loaded.config, len(sequence.block_table), BLOCK_SIZE, form_of(loaded.dtype), loaded.device)
    run_chunks(loaded.model, storage, [sequence], loaded.device)
    logits = loaded.model.forward(last_tokens(storage, [sequence], loaded.device), storage)[0]
    return float((logits.cpu() - their_logits).norm() / their_logits.norm())


def bytes_of_a_step(weight_bytes: int, sizes: Any, dtype: torch.dtype) -> int:
    """What a decode step of one sequence reads of them: all but the embedding, of which it wants one row."""
    embedding_bytes: int = sizes.vocab * sizes.hidden * dtype.itemsize
    return weight_bytes - embedding_bytes


def compiled_rates(
    device: torch.device, sizes: Any, dtype: torch.dtype, decode_rates: dict[tuple[int, int], float]
) -> Iterator[Row]:
    """transformers' decode step through torch.compile, whose graphs leave Python out; the engine beside it if known."""
    sizes = fitting(sizes, _free_bytes(device), dtype)
    yield row("layers that are compiled", sizes.layers, "")
    theirs = random_llama(device, sizes, dtype, num_layers=sizes.layers)
    options: dict[str, Any] = {"mode": "reduce-overhead"} if device.type == "cuda" else {"backend": "eager"}
    rates: dict[int, float] = {}
    for batch in sizes.batches[: 1 if sizes.is_tiny else 2]:
        torch._dynamo.reset()  # else the second is compiled for any batch, and no graph is captured for it
        step = torch.compile(theirs, **options)
        name = f"transformers, compiled, decode, batch {batch}"
        yield from attempt(name, partial(_their_rate, name, theirs, step, device, batch, sizes, rates))
        if batch in rates and (sizes.layers, batch) in decode_rates:
            rate = decode_rates[sizes.layers, batch]
            yield row(f"times transformers (compiled), batch {batch}", rate / rates[batch], "")


def _decode(engine: Engine, batch: int, sizes: Any) -> float:
    """All sequences decode before the clock starts, and none ends while it runs."""
    _add(engine, batch, sizes.prompt, max_tokens=sizes.most_tokens - sizes.prompt)
    while len(_step(engine)) < batch or engine.stats().num_scheduled_tokens != batch:
        pass
    for _ in range(sizes.steps // 2):
        _step(engine)
    started, num_tokens = time.perf_counter(), 0
    for _ in range(sizes.steps):
        num_tokens += sum(len(output.token_ids) for output in _step(engine))
    seconds = time.perf_counter() - started
    _end(engine, batch)
    return num_tokens / seconds


def _prefill(engine: Engine, device: torch.device, num_tokens: int) -> float:
    """A prompt to its first token on the host; no prefix of it is cached."""

    def prefill() -> None:
        _add(engine, 1, num_tokens, max_tokens=1)
        while engine.has_work:
            _step(engine)

    return num_tokens / _seconds(device, prefill, PREFILLS)


def _step(engine: Engine) -> list[SequenceOutput]:
    """
    Raises:
        RuntimeError: a sequence ended with an error, or there is none any more: what is waited for will not come.
    """
    if not engine.has_work:
        raise RuntimeError("the engine has nothing to do, though sequences should still run")
    outputs = engine.step()
    for output in outputs:
        if output.error_code is not None:
            raise RuntimeError(f"a sequence of request {output.request_id} ended with {output.error_code}")
    return outputs


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
def _their_logits(model: Any, device: torch.device, token_ids: list[int]) -> torch.Tensor:
    """[vocab_size] float32, on the CPU: after the last token."""
    output = model(torch.tensor([token_ids], device=device), use_cache=False, logits_to_keep=1)
    logits: torch.Tensor = output.logits[0, -1].float().cpu()
    return logits


def _their_rate(
    name: str, model: Any, step: Any, device: torch.device, batch: int, sizes: Any, rates: dict[int, float]
) -> Iterator[Row]:
    """Its row. Fills in `rates`."""
    rates[batch] = _their_decode(model, step, device, batch, sizes)
    yield row(name, rates[batch], "tokens/s")


@torch.no_grad()  # torch.compile does not get on with inference mode
def _their_decode(model: Any, step: Any, device: torch.device, batch: int, sizes: Any) -> float:
    """`step` is the model or the same compiled. Both read the whole static cache in each step."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=sizes.prompt + sizes.steps // 2 + sizes.steps + 8)
    # Releases of transformers differ in its name, and newer ones warn at each call by the old one.
    is_new = "cache" in inspect.signature(type(model).forward).parameters
    cached = {"cache" if is_new else "past_key_values": cache, "use_cache": True}
    token_ids = torch.randint(90, (batch, sizes.prompt), device=device)
    token_ids = model(token_ids, **cached, logits_to_keep=1).logits.argmax(-1)
    for _ in range(sizes.steps // 2 + 4):  # compiles, captures, and runs in as long as the engine does
        token_ids = step(token_ids, **cached).logits.argmax(-1)
    _synchronize(device)
    started = time.perf_counter()
    for _ in range(sizes.steps):
        token_ids = step(token_ids, **cached).logits.argmax(-1)
    _synchronize(device)
    num_tokens: int = batch * sizes.steps
    return num_tokens / (time.perf_counter() - started)


@torch.inference_mode()
def _their_prefill(model: Any, device: torch.device, num_tokens: int) -> Iterator[Row]:
    """The same: a prompt from the host to its first token there, as often and after the same warm-up."""
    token_ids = torch.randint(90, (1, num_tokens))

    def prefill() -> int:
        logits = model(token_ids.to(device), use_cache=True, logits_to_keep=1).logits
        return int(logits[0, -1].argmax())

    yield row("transformers, eager, prefill", num_tokens / _seconds(device, prefill, PREFILLS), "tokens/s")
