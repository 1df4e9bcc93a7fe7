"""Before it serves, an engine launches every kernel that serving can launch, by Triton's own notion of what is new.

The interpreter compiles nothing, so launches are noted here as Triton would look them up: the kernel, its constants,
and of every other argument what it is specialised for.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from triton.backends.nvidia.compiler import CUDABackend
from triton.language import constexpr
from triton.runtime.interpreter import GridExecutor
from triton.runtime.jit import native_specialize_impl

from pagedd.engine.config import EngineConfig
from pagedd.engine.create import create_engine
from pagedd.engine.engine import Engine
from pagedd.engine.model.config import parse_decoder_config
from pagedd.engine.model.decoder import Decoder
from pagedd.engine.model.load import LoadedModel
from pagedd.engine.model.weight_blocks import WeightBlocks
from pagedd.engine.request import Request
from pagedd.engine.sampling_params import SamplingParams
from pagedd.engine.warm_up import launch_everything, steps_of_every_kind
from pagedd.kernels import cpu, ops

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 72,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
# With a bias and a window, as 4 and 8 bits beside each other; with norms of heads, not quantized.
MODELS = {
    "qwen2": SIZES | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    "qwen3": SIZES | {"model_type": "qwen3"},
}
MAX_TOKENS, MAX_SEQS, MAX_LEN = 80, 6, 400


class RandomWeights:
    """A checkpoint of whatever is asked for; of qwen2, matrices in blocks: the second layer's in 8 bits."""

    def __init__(self, architecture: str) -> None:
        self._has_blocks = architecture == "qwen2"
        self._generator = torch.Generator().manual_seed(0)
        heads, kv_heads, dim = SIZES["num_attention_heads"], SIZES["num_key_value_heads"], SIZES["head_dim"]
        hidden, inner = SIZES["hidden_size"], SIZES["intermediate_size"]
        self._shapes = {
            "q_proj": (heads * dim, hidden),
            "k_proj": (kv_heads * dim, hidden),
            "v_proj": (kv_heads * dim, hidden),
            "o_proj": (hidden, heads * dim),
            "gate_proj": (inner, hidden),
            "up_proj": (inner, hidden),
            "down_proj": (hidden, inner),
            "embed_tokens": (SIZES["vocab_size"], hidden),
            "lm_head": (SIZES["vocab_size"], hidden),
            "q_norm": (dim,),
            "k_norm": (dim,),
        }

    def __contains__(self, name: str) -> bool:
        return True

    def get(self, name: str) -> torch.Tensor:
        shape = self._shape(name)
        return torch.randn(shape[:1] if name.endswith("bias") else shape, generator=self._generator)

    def blocks(self, name: str) -> WeightBlocks | None:
        if not self._has_blocks:
            return None
        num_rows, num_inputs = self._shape(name)
        bits = 8 if ".1." in name else 4
        q = np.zeros((num_rows, num_inputs), dtype=np.uint8)
        scale = np.ones((num_rows, num_inputs // 32), dtype=np.float16)
        return WeightBlocks(bits, q, scale, -scale)

    def nested_blocks(self, name: str) -> None:
        return None

    def is_quantized(self, name: str) -> bool:
        return self._has_blocks

    def _shape(self, name: str) -> tuple[int, ...]:
        return self._shapes.get(name.split(".")[-2], (SIZES["hidden_size"],))


@contextmanager
def noted_launches() -> Iterator[set[Any]]:
    """Keys of all launches made meanwhile; none is run, outputs stay as they are."""
    noted: set[Any] = set()
    run = GridExecutor.__call__

    def note(executor: Any, *arguments: Any, **options: Any) -> None:
        options = {name: value for name, value in options.items() if name in executor.arg_names}
        noted.add(key_of(executor, dict(zip(executor.arg_names, arguments, strict=False)) | options))

    GridExecutor.__call__ = note
    try:
        yield noted
    finally:
        GridExecutor.__call__ = run


def key_of(executor: Any, arguments: dict[str, Any]) -> tuple[Any, ...]:
    annotations, decorator = executor.fn.__annotations__, DECORATORS[executor.fn.__name__]
    key: list[Any] = [executor.fn.__name__]
    for name, value in arguments.items():
        if annotations.get(name) is constexpr or annotations.get(name) == "tl.constexpr":
            key.append((name, value))
        else:
            is_specialised = name not in (decorator.get("do_not_specialize") or ())
            is_aligned = name not in (decorator.get("do_not_specialize_on_alignment") or ())
            key.append((name, *native_specialize_impl(CUDABackend, value, False, is_specialised, is_aligned)))
    return tuple(key)


def _decorators() -> dict[str, dict[str, Any]]:
    """Name of a kernel → what its `triton.jit` was given."""
    from triton.runtime.interpreter import InterpretedFunction

    from pagedd.kernels.triton import (
        close_blocks,
        linear,
        paged_attention,
        rms_norm,
        rope_kv,
        silu_and_mul,
        split_decode,
        top_k_top_p,
    )

    modules = (close_blocks, linear, paged_attention, rms_norm, rope_kv, silu_and_mul, split_decode, top_k_top_p)
    functions = [part for module in modules for part in vars(module).values() if isinstance(part, InterpretedFunction)]
    return {function.fn.__name__: function.kwargs for function in functions}


DECORATORS = _decorators()


@pytest.fixture(autouse=True)
def _restored(monkeypatch):
    monkeypatch.setenv(ops.BACKEND_VARIABLE, "triton")
    monkeypatch.setattr(cpu, "loaded", lambda: None)  # an earlier test's C++ would draw the tokens
    yield
    monkeypatch.undo()
    ops.select_backend(CPU)


def make_engine(architecture: str, form: str) -> Engine:
    config = parse_decoder_config(MODELS[architecture])
    backend = ops.select_backend(CPU)
    decoder = Decoder(
        config, RandomWeights(architecture), torch.bfloat16, CPU, lambda share, what: None, keeps_packed=True
    )
    loaded = LoadedModel(decoder, backend, config, CPU, torch.bfloat16)
    settings = EngineConfig(
        model="random",
        num_blocks=100,
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=MAX_TOKENS,
        max_model_len=MAX_LEN,
        kv_cache_dtype=form,
        num_speculative_tokens=0,
        num_threads=1,
    )
    with noted_launches():
        return create_engine(settings, lambda share, what: None, load=lambda config, progress: loaded)[0]


def serve(engine: Engine) -> None:
    """Prompts of many lengths beside decodes, alone and together, contexts up to the longest, all kinds of draws."""
    model = engine._runner._model
    forward = model.forward  # its logits are whatever the memory held, as no kernel runs
    model.forward = lambda batch, kv: torch.zeros_like(forward(batch, kv))
    lens = [1, 2, 3, 5, 7, 9, 12, 17, 20, 26, 33, 40, 63, 64, 65, 79, 130, 300, 380]
    kinds = [{"temperature": 0.0}, {"top_k": 4}, {"top_p": 0.5, "presence_penalty": 0.5}, {"logit_bias": {3: 1.0}}]
    for together in (1, 3):
        for number, length in enumerate(lens):
            params = SamplingParams(max_tokens=4, **kinds[number % len(kinds)])  # type: ignore[arg-type]
            engine.add(Request(request_id=f"{together} {number}", prompt_token_ids=[1] * length, params=params))
            while engine.has_work and len(engine._scheduler._groups) >= together:
                engine.step()
        while engine.has_work:
            engine.step()


@pytest.mark.parametrize(("architecture", "form"), [("qwen2", "bf16"), ("qwen2", "int8"), ("qwen3", "int4")])
def test_serving_launches_nothing_that_was_not_launched_before(architecture: str, form: str) -> None:
    engine = make_engine(architecture, form)
    with noted_launches() as before:
        launch_everything(engine._runner, MAX_TOKENS, MAX_SEQS, MAX_LEN, block_size=16)
    with noted_launches() as while_serving:
        serve(engine)
    assert {key[0] for key in while_serving} >= {"_rope_kv_kernel", "_attend", "_attend_splits", "_top_k_top_p_kernel"}
    new = while_serving - before
    assert not new, "\n".join(map(str, new))


def test_the_head_is_never_asked_for_more_rows_than_there_are_draws() -> None:
    engine = make_engine("qwen3", "bf16")
    model, seen = engine._runner._model, []
    forward = model.forward
    model.forward = lambda batch, kv: seen.append(len(batch.logits_rows)) or forward(batch, kv)
    with noted_launches():
        launch_everything(engine._runner, MAX_TOKENS, MAX_SEQS, MAX_LEN, block_size=16)
    assert max(seen) == MAX_SEQS


@pytest.mark.parametrize("max_num_tokens", [1, 40, 100])
def test_no_sequence_is_longer_than_the_model_allows_and_no_step_larger_than_the_budget(max_num_tokens: int) -> None:
    max_logits_rows = min(40, max_num_tokens)
    steps = list(steps_of_every_kind(max_num_tokens, max_logits_rows, max_model_len=24, block_size=8))
    assert {step.num_scheduled_tokens for step in steps} >= {1, max_logits_rows, max_num_tokens}
    for step in steps:
        assert step.num_scheduled_tokens <= max_num_tokens
        assert sum(item.num_draws for item in step.scheduled) <= max_logits_rows
        for item in step.scheduled:
            assert len(item.token_ids) == item.num_scheduled_tokens
            assert item.start + item.num_scheduled_tokens <= 24
            assert set(item.sequence.block_table) == {0}
