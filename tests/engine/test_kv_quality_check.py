"""The quality of a quantized cache at load: figures with exact values, and what follows of them."""

import dataclasses
import logging
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pagedd.daemon.models import resolve_model
from pagedd.daemon.text.sample import sample_text
from pagedd.daemon.text.tokenizer import TextTokenizer
from pagedd.engine import create
from pagedd.engine.batch import Batch
from pagedd.engine.config import EngineConfig
from pagedd.engine.create import create_engine, create_runner
from pagedd.engine.errors import EngineError
from pagedd.engine.kv.quality import AGREEMENT_BARS, LARGER_FORM, KVQuality
from pagedd.engine.kv.storage import KVStorage
from pagedd.engine.kv_quality_check import check_kv_quality, judge, reference_form
from pagedd.engine.model.load import LoadedModel, Model, load_model
from pagedd.kernels.kv_form import FORMS

SIZES = SimpleNamespace(num_layers=1, num_kv_heads=1, head_dim=32)
CPU = torch.device("cpu")


class WaveringModel:
    """Predicts token 0 with three quarters over 16 bits; over a quantized cache token 1 instead, after odd tokens."""

    kv_forms = frozenset(FORMS)

    def __init__(self) -> None:
        self.num_pages: list[int] = []

    def forward(self, batch: Batch, kv: KVStorage) -> torch.Tensor:
        if kv.form.has_open_keys:
            self.num_pages.append(kv.open_pages.num_used)
        logits = torch.tensor([[0.75, 0.25]]).log().repeat(len(batch.token_ids), 1)
        if kv.form.dtype is None:
            logits[batch.token_ids % 2 == 1] = torch.tensor([0.25, 0.75]).log()
        return logits[batch.logits_rows]


def quality(agreement: float, form: str = "int4") -> KVQuality:
    return KVQuality(form=form, agreement=agreement, divergence_nats=0.5, num_tokens=200)


@pytest.mark.parametrize("max_rows", [1, 3, 64])
def test_agreement_and_divergence_are_means_over_all_tokens(max_rows: int) -> None:
    storage = KVStorage(SIZES, 2, 16, FORMS["int8"], CPU)
    found = check_kv_quality(WaveringModel(), storage, SIZES, [0, 2, 4, 1, 6, 8, 10, 12], max_rows=max_rows)
    divergence = 0.75 * math.log(3) - 0.25 * math.log(3)
    assert found.agreement == 7 / 8
    assert found.divergence_nats == pytest.approx(divergence / 8)
    assert (found.form, found.num_tokens) == ("int8", 8)


def test_pages_of_open_keys_are_given_back_on_the_way_and_at_the_end() -> None:
    model, storage = WaveringModel(), KVStorage(SIZES, 4, 16, FORMS["int4"], CPU, num_pages=2)
    check_kv_quality(model, storage, SIZES, list(range(52)), max_rows=10)
    assert max(model.num_pages) <= 2
    assert storage.open_pages.num_used == 0


def test_the_cache_is_compared_with_sixteen_bits_of_whichever_kind_there_is() -> None:
    assert reference_form(frozenset({"bf16", "fp16", "int8"})).name == "bf16"
    assert reference_form(frozenset({"fp16", "int8"})).name == "fp16"


def test_every_quantized_form_has_a_bar_and_a_larger_form() -> None:
    quantized = {name for name, form in FORMS.items() if form.dtype is None}
    assert AGREEMENT_BARS.keys() == LARGER_FORM.keys() == quantized


def test_a_good_cache_is_only_noted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        judge(quality(0.9), "refuse")
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_a_poor_cache_is_one_warning_with_figures_and_the_flag(caplog: pytest.LogCaptureFixture) -> None:
    judge(quality(0.895), "warn")
    (record,) = caplog.records
    assert (record.levelname, record.getMessage()) == (
        "WARNING",
        "KV cache: int4 agrees with 16 bits in 89.5 % of 200 tokens, 90 % are usual; divergence 0.5000 nats; "
        "use --kv-cache-dtype int8",
    )


def test_a_poor_cache_is_refused_with_figures_and_the_flag() -> None:
    message = r"^poor_kv_quality: int4 agrees with 16 bits in 12.0 % .* 90 % .* int8, or .* --kv-quality-check warn$"
    with pytest.raises(EngineError, match=message):
        judge(quality(0.12), "refuse")


def test_numbers_that_are_none_are_a_poor_cache() -> None:
    class Broken(WaveringModel):
        def forward(self, batch: Batch, kv: KVStorage) -> torch.Tensor:
            return super().forward(batch, kv) * (math.nan if kv.form.dtype is None else 1)

    storage = KVStorage(SIZES, 1, 16, FORMS["fp8"], CPU)
    found = check_kv_quality(Broken(), storage, SIZES, [0, 2, 4], max_rows=8)
    assert not found.is_good


class BrokenScales:
    """The real model, over an int8 cache whose keys it reads four times as large as it wrote them."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)

    def forward(self, batch: Batch, kv: KVStorage) -> torch.Tensor:
        logits = self._model.forward(batch, kv)
        if kv.form.name == "int8":
            blocks = (batch.attention.slot_mapping // kv.block_size).unique()
            keys = kv.planes[0]
            first = kv.block_size * 64  # behind the rows of values, a head's dimensions each
            scales = keys[:, blocks, :, first : first + 2 * kv.block_size].contiguous().view(torch.bfloat16) * 4
            keys[:, blocks, :, first : first + 2 * kv.block_size] = scales.view(torch.uint8)
        return logits


@pytest.fixture(scope="module")
def checked(model_gguf: Path) -> EngineConfig:
    token_ids = TextTokenizer(resolve_model(str(model_gguf))).encode(sample_text())
    return EngineConfig(
        model=str(model_gguf),
        device="cpu",
        num_blocks=16,  # a text of 256 tokens: enough to tell sound from broken
        kv_quality_check="refuse",
        kv_quality_token_ids=tuple(token_ids),
    )


@pytest.fixture(scope="module")
def loaded(checked: EngineConfig, cpu_extension: object) -> LoadedModel:
    return load_model(checked, lambda share, what: None)


def test_the_real_models_cache_is_good_and_leaves_the_pool_as_it_was(
    checked: EngineConfig, loaded: LoadedModel
) -> None:
    for form in AGREEMENT_BARS:
        config = dataclasses.replace(checked, kv_cache_dtype=form)
        engine, info = create_engine(config, lambda share, what: None, lambda config, progress: loaded)
        assert info.kv_quality is not None
        assert (info.kv_quality.form, info.kv_quality.num_tokens) == (form, 256)
        assert 0 < info.kv_quality.divergence_nats < 0.05
        stats = engine.stats()
        assert (stats.num_blocks_free, stats.num_blocks_cached, stats.num_blocks_used) == (16, 0, 0)
        assert engine.check_when_idle() is False


def test_broken_scales_are_refused(checked: EngineConfig, loaded: LoadedModel) -> None:
    broken = dataclasses.replace(loaded, model=BrokenScales(loaded.model))  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="poor_kv_quality: int8 agrees"):
        create_runner(checked, lambda share, what: None, lambda config, progress: broken)


@pytest.mark.parametrize(
    "settings",
    [{"kv_quality_check": "off"}, {"kv_quality_token_ids": ()}, {"kv_cache_dtype": "bf16"}],
    ids=["off", "no text", "16 bits"],
)
def test_nothing_is_measured_where_there_is_no_reason(
    checked: EngineConfig, loaded: LoadedModel, settings: dict[str, object]
) -> None:
    config = dataclasses.replace(checked, **settings)  # type: ignore[arg-type]
    _, info = create_runner(config, lambda share, what: None, lambda config, progress: loaded)
    assert info.kv_quality is None


def test_what_is_known_of_the_form_is_not_measured_again(
    checked: EngineConfig, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    def measure(*args: object, max_rows: int) -> KVQuality:
        measured.append(quality(0.99, "int8"))
        return measured[0]

    monkeypatch.setattr(create, "check_kv_quality", measure)
    for known, expected, num_measured in ((quality(0.95, "int8"), 0.95, 0), (quality(0.95, "int4"), 0.99, 1)):
        config = dataclasses.replace(checked, kv_quality=known)
        _, info = create_runner(config, lambda share, what: None, lambda config, progress: loaded)
        assert info.kv_quality is not None
        assert info.kv_quality.agreement == expected
        assert len(measured) == num_measured
