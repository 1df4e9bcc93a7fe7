"""A tiny model through the whole engine over Triton's kernels, interpreted: the same greedy tokens as the reference.

Also as a GPU runs it: ahead, and with decode steps replayed from graphs, whose launches are recorded once.
"""

import json
from pathlib import Path

import pytest
import torch

from pagedd.bench.recorded_launches import capture_by_recording
from pagedd.engine.config import EngineConfig
from pagedd.engine.create import create_engine
from pagedd.engine.cuda_graphs import DecodeGraphs
from pagedd.engine.engine import Engine
from pagedd.engine.errors import EngineError
from pagedd.engine.model.load import check_loadable
from pagedd.engine.model.safetensors import SafetensorsCheckpoint
from pagedd.engine.request import Request
from pagedd.engine.sampling_params import SamplingParams
from pagedd.kernels import ops

from .conftest import save_random_model

# The third fills a block of 16 while it decodes.
PROMPTS = [[5, 6, 7], [i % 37 for i in range(21)], [1, 2] * 7, [9], [5, 6, 7, 8]]
NUM_OUTPUT_TOKENS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    save_random_model(
        folder,
        "qwen3",
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        initializer_range=0.4,
    )
    return folder


@pytest.fixture(autouse=True)
def _restored():
    yield
    ops.select_backend(torch.device("cpu"))


def make_engine(folder: Path, **settings: object) -> Engine:
    config = EngineConfig(
        model=str(folder),
        device="cpu",
        dtype="float32",
        block_size=16 if settings.get("kv_cache_dtype") == "int4" else 8,
        num_blocks=24,
        max_num_batched_tokens=16,
        num_speculative_tokens=0,
        num_threads=1,
        **settings,  # type: ignore[arg-type]
    )
    return create_engine(config, lambda share, what: None)[0]


def answers(engine: Engine) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for number, prompt in enumerate(PROMPTS):
        params = SamplingParams(max_tokens=NUM_OUTPUT_TOKENS, temperature=0)
        engine.add(Request(request_id=str(number), prompt_token_ids=prompt, params=params))
    while engine.has_work:
        for output in engine.step():
            assert output.error_code is None
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    return tokens


# Not int4: the interpreter cuts off where a card, and the tests of the kernels, round a float32 key to bfloat16.
@pytest.mark.parametrize("form", ["float32", "int8", "k8v4"])
def test_tokens_over_triton_equal_those_over_the_reference(folder, monkeypatch, form) -> None:
    monkeypatch.setenv(ops.BACKEND_VARIABLE, "reference")
    wanted = answers(make_engine(folder, kv_cache_dtype=form))
    assert all(len(tokens) == NUM_OUTPUT_TOKENS for tokens in wanted.values())
    monkeypatch.setenv(ops.BACKEND_VARIABLE, "triton")
    assert answers(make_engine(folder, kv_cache_dtype=form)) == wanted


def test_a_model_whose_heads_have_no_kernel_is_refused_before_a_weight_is_read(folder, monkeypatch, tmp_path) -> None:
    wide = {"num_attention_heads": 130, "num_key_value_heads": 1}
    config = json.loads((folder / "config.json").read_text()) | wide
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    monkeypatch.setattr(SafetensorsCheckpoint, "get", None)
    monkeypatch.setenv(ops.BACKEND_VARIABLE, "triton")
    with pytest.raises(EngineError, match=r"unsupported_model: 130 query heads a KV head, .*; use device") as at_load:
        make_engine(tmp_path, kv_cache_dtype="int8")
    with pytest.raises(EngineError) as when_checked:
        check_loadable(EngineConfig(model=str(tmp_path), device="cpu", dtype="float32", kv_cache_dtype="int8"))
    assert str(when_checked.value) == str(at_load.value)


@pytest.mark.parametrize("form", ["float32", "int4"])
def test_running_ahead_from_graphs_changes_no_token(folder, monkeypatch, form) -> None:
    monkeypatch.setenv(ops.BACKEND_VARIABLE, "triton")
    wanted = answers(make_engine(folder, kv_cache_dtype=form))
    engine = make_engine(folder, async_scheduling="on", kv_cache_dtype=form)
    runner = engine._runner
    runner.graphs = DecodeGraphs(
        runner._model,
        runner._storage,
        scratch_block=23,  # the last block, which these prompts never come to
        max_num_seqs=4,
        max_model_len=64,
        vocab_size=40,
        device=torch.device("cpu"),
        capture=capture_by_recording,
    )
    replays = []
    run = runner.graphs.run
    monkeypatch.setattr(runner.graphs, "run", lambda batch: replays.append(len(batch.token_ids)) or run(batch))
    assert answers(engine) == wanted
    assert replays
