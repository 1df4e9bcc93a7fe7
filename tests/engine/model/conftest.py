"""Tiny random models of transformers on disk, and pagedd's logits for any way of cutting prompts into steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedd.engine.batch import build_batch
from pagedd.engine.config import EngineConfig
from pagedd.engine.kv.storage import KVStorage
from pagedd.engine.model.load import LoadedModel, load_model
from pagedd.engine.request import Request
from pagedd.engine.sampling_params import SamplingParams
from pagedd.engine.sequence import Sequence
from pagedd.engine.step import ScheduledSequence
from pagedd.kernels.kv_form import FORMS, form_of


def _save_tiny(folder: Path, config: Any) -> Any:
    """A model with weights large enough that every part of it shows in the logits, norms and biases included."""
    from transformers import AutoModelForCausalLM

    generator = torch.Generator().manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator) * 0.15
            weight.copy_(1 + noise if "norm" in name and name.endswith("weight") else noise)
    model.save_pretrained(folder)
    return model


def _paged_logits(
    loaded: LoadedModel,
    prompts: list[list[int]],
    steps: list[dict[int, int]],
    block_size: int = 8,
    kv_form: str | None = None,
) -> list[dict[int, torch.Tensor]]:
    """Runs `steps`, each of which says how many tokens of which prompt it computes.

    Returns:
        for each prompt, position → logits, [vocab_size], at the last position of every chunk.
    """
    num_blocks = [-(-len(prompt) // block_size) for prompt in prompts]
    form = form_of(loaded.dtype) if kv_form is None else FORMS[kv_form]
    num_pages = sum(num_blocks) if form.has_open_keys else 0
    kv = KVStorage(loaded.config, sum(num_blocks), block_size, form, loaded.device, num_pages=num_pages)
    scattered = torch.randperm(sum(num_blocks), generator=torch.Generator().manual_seed(1)).tolist()
    sequences = [
        Sequence(
            request=Request(request_id=str(i), prompt_token_ids=prompt, params=SamplingParams(max_tokens=1)),
            choice_index=0,
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            arrival_s=0.0,
            due_s=0.0,
            priority=0,
            order=i,
            block_table=[scattered.pop() for _ in range(num_blocks[i])],
        )
        for i, prompt in enumerate(prompts)
    ]
    logits: list[dict[int, torch.Tensor]] = [{} for _ in prompts]
    for step in steps:
        scheduled = [
            ScheduledSequence(sequences[i], sequences[i].num_computed_tokens, count, [sequences[i]])
            for i, count in step.items()
        ]
        with torch.inference_mode():
            pages = kv.open_pages if form.has_open_keys else None
            batch = build_batch(scheduled, block_size, loaded.device, open_pages=pages)
            rows = loaded.model.forward(batch, kv)
        for row, (i, count) in zip(rows, step.items(), strict=True):
            sequences[i].num_computed_tokens += count
            logits[i][sequences[i].num_computed_tokens - 1] = row
    return logits


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Any]]:
    """`tiny(config)` → (folder, transformers' model): random weights in float32, saved as safetensors."""

    def make(config: Any) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp(config.model_type)
        return folder, _save_tiny(folder, config)

    return make


@pytest.fixture(scope="session")
def load() -> Callable[..., LoadedModel]:
    """`load(path)` in float32 on the CPU."""

    def make(path: Path, **settings: Any) -> LoadedModel:
        config = EngineConfig(model=str(path), device="cpu", **({"dtype": "float32"} | settings))
        return load_model(config, lambda share, what: None)

    return make


@pytest.fixture(scope="session")
def paged_logits() -> Callable[..., list[dict[int, torch.Tensor]]]:
    return _paged_logits


@pytest.fixture(scope="session")
def check_logits() -> Callable[..., None]:
    """Holds pagedd's logits within 1e-3 of transformers', for prompts cut into `steps`."""

    def check(
        loaded: LoadedModel, model: Any, prompts: list[list[int]], steps: list[dict[int, int]], **how: Any
    ) -> None:
        for prompt, rows in zip(prompts, _paged_logits(loaded, prompts, steps, **how), strict=True):
            with torch.inference_mode():
                expected = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0].float()
            assert max(rows) == len(prompt) - 1, "the steps do not cover the prompt"
            for position, logits in rows.items():
                torch.testing.assert_close(logits, expected[position], rtol=0, atol=1e-3)

    return check
