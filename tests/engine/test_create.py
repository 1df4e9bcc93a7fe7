"""From settings to a runner: what is chosen, what is refused, and what the pool gets."""

import logging
from functools import partial

import pytest
import torch

from pagedd.engine.config import EngineConfig
from pagedd.engine.config_check import refuse_unfit
from pagedd.engine.create import create_runner
from pagedd.engine.errors import EngineError
from pagedd.engine.foresee import foresee
from pagedd.engine.kv import pool_check
from pagedd.engine.kv.pool_check import choose_kv_form
from pagedd.engine.model import load
from pagedd.engine.model.cpu_decoder import KV_FORMS
from pagedd.engine.model.load import check_loadable
from pagedd.engine.model.safetensors import SafetensorsCheckpoint

from .conftest import save_random_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    save_random_model(
        folder,
        "llama",
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        eos_token_id=3,
    )
    return folder


def make(folder, **settings):
    settings = {"device": "cpu", "dtype": "float32", "num_threads": torch.get_num_threads()} | settings
    return create_runner(EngineConfig(model=str(folder), **settings), lambda share, what: None)


def test_the_factory_fills_in_every_choice(folder, caplog) -> None:
    with caplog.at_level(logging.INFO):
        runner, info = make(folder, max_num_seqs=3)
    assert (info.device, info.dtype, info.kv_cache_dtype, info.kernel_backend) == ("cpu", "float32", "float32", "torch")
    assert (info.vocab_size, info.max_model_len) == (40, 64)
    assert info.max_num_batched_tokens == 512
    assert info.kv_bytes_per_token == 2 * 2 * 1 * 8 * 4
    assert info.num_blocks == 3 * 4  # all seats at full length; far less than the memory would hold
    assert "the KV pool has 12 blocks for 192 tokens in 0.00 GiB; 3.0 full-length requests fit" in caplog.text
    assert set(runner.seconds.values()) == {0.0}, "the warm-up is not a step"


def test_what_is_foreseen_before_a_weight_is_read_is_what_the_engine_chooses(folder) -> None:
    foreseen = foresee(EngineConfig(model=str(folder), device="cpu", dtype="float32"), has_model=True)
    runner, info = make(folder)
    for name in ("device", "dtype", "kv_cache_dtype", "max_model_len", "max_num_batched_tokens"):
        assert foreseen[name] == getattr(info, name), name
    assert (foreseen["async_scheduling"] == "on") == runner.runs_ahead


def test_a_pool_smaller_than_the_budget_can_be_warmed_up(folder) -> None:
    _, info = make(folder, num_blocks=1, block_size=8)
    assert info.num_blocks == 1


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"num_blocks": 10**9},
            r"num_blocks 1000000000 of 2048 bytes take 1907\.3 GiB beside 0\.0 GiB of weights, cpu has 64\.0 GiB; 335",
        ),
        ({"num_blocks": 33_554_431}, r"; 3355\d+ would fill it$"),  # all but for the weights
        ({"kv_host_gib": 65.0}, r"kv_host_gib 65, the host has 64\.0 GiB; lower it$"),
        ({"kv_host_gib": 64.0}, r"kv_host_gib 64 beside 0\.0 GiB of weights, the host has 64\.0 GiB; lower it$"),
        (  # either alone would fit
            {"num_blocks": 20 << 20, "kv_host_gib": 40.0},
            r"take 40\.0 GiB beside 0\.0 GiB of weights and kv_host_gib 40, cpu has 64\.0 GiB; 1258\d+ would fill it$",
        ),
    ],
)
def test_a_pool_that_the_machine_can_never_hold_is_refused_before_a_weight_is_read(
    folder, monkeypatch: pytest.MonkeyPatch, settings, said: str
) -> None:
    monkeypatch.setattr(pool_check, "total_bytes", lambda device: 64 << 30)
    monkeypatch.setattr(load, "_make_decoder", lambda *args: pytest.fail("weights are read"))
    with pytest.raises(EngineError, match=f"^invalid_setting: .*{said}"):
        make(folder, **settings)
    with pytest.raises(EngineError, match=said):
        foresee(EngineConfig(model=str(folder), device="cpu", dtype="float32", **settings), has_model=True)


def test_a_host_tier_that_the_machine_can_never_hold_is_refused_whoever_reads_the_model(tmp_path, monkeypatch) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    monkeypatch.setattr(pool_check, "total_bytes", lambda device: 64 << 30)
    settings = EngineConfig(model=str(tmp_path), device="cpu", kv_host_gib=65.0)
    for ask in (partial(load.load_model, progress=lambda share, what: None), load.check_loadable):
        with pytest.raises(EngineError, match=r"^invalid_setting: kv_host_gib 65, the host has 64\.0 GiB; lower it$"):
            ask(settings)


def test_the_kv_cache_may_be_narrower_than_the_activations(folder) -> None:
    _, info = make(folder, num_blocks=2, kv_cache_dtype="bf16")
    assert (info.dtype, info.kv_cache_dtype) == ("float32", "bf16")


@pytest.mark.parametrize(("form", "num_bytes"), [("int8", 2 * 2 * 1 * 12), ("fp8", 2 * 2 * 1 * 12), ("int4", 32)])
def test_a_quantized_cache_serves_and_says_what_a_token_takes(folder, caplog, form, num_bytes) -> None:
    with caplog.at_level(logging.INFO):
        runner, info = make(folder, num_blocks=4, kv_cache_dtype=form)  # the warm-up fills it
    assert (info.dtype, info.kv_cache_dtype, info.kv_bytes_per_token) == ("float32", form, num_bytes)
    assert f"a token takes {num_bytes} bytes as {form}" in caplog.text
    assert runner._storage.num_bytes == 4 * 16 * num_bytes


def test_an_unknown_form_of_the_cache_is_refused_with_those_there_are(folder) -> None:
    with pytest.raises(
        EngineError, match=r"kv_cache_dtype 'int3', .* float32, bf16, fp16, int8, fp8, k8v4, int4; use one"
    ):
        make(folder, num_blocks=2, kv_cache_dtype="int3")


def test_a_form_that_only_torch_reads_is_refused_where_the_cpp_decoder_serves() -> None:
    with pytest.raises(EngineError, match=r"kv_cache_dtype 'fp16', .* float32, bf16, int8, fp8, k8v4, int4;"):
        refuse_unfit(EngineConfig(model="m", kv_cache_dtype="fp16"), 64, KV_FORMS)


def test_a_form_that_quantizes_whole_blocks_is_refused_in_small_ones(folder) -> None:
    with pytest.raises(EngineError, match=r"block_size 8 with kv_cache_dtype int4, .* use block_size 16"):
        make(folder, num_blocks=2, kv_cache_dtype="int4", block_size=8)


def test_the_form_of_the_cache_follows_the_weights_unless_it_is_asked_for() -> None:
    def chosen(name: str, head_dim: int = 64, *, beside_quantized: bool = True) -> str:
        return choose_kv_form(name, torch.bfloat16, head_dim, beside_quantized=beside_quantized).name

    assert chosen("auto") == "int8"
    assert chosen("auto", beside_quantized=False) == "bf16"
    assert chosen("auto", head_dim=90) == "bf16"
    assert chosen("float32") == "float32"


def test_a_context_longer_than_the_models_own_is_refused_with_both_numbers(folder) -> None:
    with pytest.raises(EngineError, match=r"invalid_setting: max_model_len 65, the model's own context is 64"):
        make(folder, max_model_len=65)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_model_len": 65},
        {"kv_cache_dtype": "int3"},
        {"kv_cache_dtype": "int4", "block_size": 8},
        {"weight_dtype": "int8", "dtype": "float16"},
        {"device": "tpu"},
    ],
)
def test_what_does_not_fit_is_refused_in_the_same_words_before_a_weight_is_read(folder, monkeypatch, wrong) -> None:
    def read(*arguments: object) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(SafetensorsCheckpoint, "get", read)
    with pytest.raises(EngineError) as at_load:
        make(folder, **wrong)
    with pytest.raises(EngineError) as when_checked:
        check_loadable(EngineConfig(**{"model": str(folder), "device": "cpu", "dtype": "float32", **wrong}))
    assert str(when_checked.value) == str(at_load.value)
    check_loadable(EngineConfig(model=str(folder), device="cpu", max_model_len=64))


def test_an_unknown_backend_is_refused(folder, monkeypatch) -> None:
    monkeypatch.setenv("PAGEDD_KERNELS", "abacus")
    with pytest.raises(EngineError, match=r"invalid_setting: PAGEDD_KERNELS='abacus'"):
        make(folder)


def test_a_vocabulary_whose_weights_could_overflow_is_refused(folder, monkeypatch) -> None:
    monkeypatch.setattr("pagedd.engine.create.MAX_VOCAB_SIZE", 39)
    with pytest.raises(EngineError, match="unsupported_model: vocabulary of 40 tokens, at most 39"):
        make(folder)


def test_memory_that_holds_no_block_is_refused(folder, monkeypatch) -> None:
    monkeypatch.setattr("pagedd.engine.create.free_bytes", lambda device: 1000)
    with pytest.raises(EngineError, match="no_kv_memory"):
        make(folder)


def test_the_pool_comes_from_what_a_card_has_free_and_the_log_says_what_fits(folder, monkeypatch, caplog) -> None:
    free = int(3.22 * 2**20)  # as many MiB as a small card has GiB: what is allocated here is real
    monkeypatch.setattr("pagedd.engine.create.free_bytes", lambda device: free)
    settings = {"max_num_seqs": 1000, "gpu_memory_utilization": 0.9}
    with caplog.at_level(logging.INFO):
        _, info = make(folder, max_num_batched_tokens=64, **settings)
    num_bytes = info.num_blocks * 16 * info.kv_bytes_per_token
    assert 0 < num_bytes < 0.9 * free
    full_requests = info.num_blocks / (64 / 16)
    assert (
        f"the KV pool has {info.num_blocks} blocks for {16 * info.num_blocks} tokens in 0.00 GiB; "
        f"{full_requests:.1f} full-length requests fit" in caplog.text
    )
    _, wider = make(folder, max_num_batched_tokens=512, **settings)
    assert wider.num_blocks < info.num_blocks, "a wider step has a larger reserve"


def test_progress_ends_with_ready(folder) -> None:
    told: list[tuple[float, str]] = []
    config = EngineConfig(model=str(folder), device="cpu", num_blocks=2, num_threads=torch.get_num_threads())
    create_runner(config, lambda share, what: told.append((share, what)))
    assert told[-1] == (1.0, "ready")
    assert [share for share, _ in told] == sorted(share for share, _ in told)
