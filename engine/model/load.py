"""From a path to a model in memory: the fused decoder or the adapter, in which form, over which kernels.

Owns those choices. Device and dtype are `device.py`'s, formats `gguf.py`'s and `safetensors.py`'s; what a config means
is `config.py`'s.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Protocol

import torch

from pagedd.engine.batch import Batch
from pagedd.engine.config import EngineConfig
from pagedd.engine.config_check import refuse_unfit
from pagedd.engine.errors import EngineError
from pagedd.engine.kv.pool_check import refuse_impossible_host_tier, refuse_impossible_pools
from pagedd.engine.kv.storage import KVStorage, total_bytes
from pagedd.engine.model.config import FUSED_ARCHITECTURES, DecoderConfig, ModelConfig, parse_decoder_config, parse_eos
from pagedd.engine.model.cpu_decoder import KV_FORMS as CPP_KV_FORMS
from pagedd.engine.model.cpu_decoder import CpuDecoder, unfit_for_cpu
from pagedd.engine.model.decoder import Checkpoint, Decoder
from pagedd.engine.model.device import choose_dtype, usable_device
from pagedd.engine.model.safetensors import SafetensorsCheckpoint, read_json
from pagedd.kernels import cpu, ops
from pagedd.kernels.kv_form import FORMS, KVForm, form_of

log = logging.getLogger(__name__)

_SHORT_NAMES = {torch.float32: "float32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class FileCheckpoint(Checkpoint, Protocol):
    """A checkpoint whose sizes are known before its numbers are read."""

    def least_bytes(self, itemsize: int) -> int:
        """What its tensors take at least, of so many bytes a number where they are not quantized."""
        ...


class Model(Protocol):
    """Tokens in, logits out, KV written on the way.

    Attributes:
        weight_bytes: what the weights take in memory.
        can_be_captured: a decode step waits for nothing but kernels, so that it can become a CUDA graph.
        own_kernels: name of the kernels that it brings; `None` where it runs over `kernels/ops.py`.
        has_quantized_weights: some are held in 8 bits or fewer.
        kv_forms: names of the forms of the KV cache that it can run over, of `kernels/kv_form.py`.
    """

    weight_bytes: int
    can_be_captured: bool
    own_kernels: str | None
    has_quantized_weights: bool
    kv_forms: frozenset[str]

    def forward(self, batch: Batch, kv: KVStorage) -> torch.Tensor:
        """[num_rows, vocab_size] float32: the logits of `batch.logits_rows`."""
        ...

    def activation_bytes(self, num_tokens: int, num_rows: int, max_context_len: int, kv_form: KVForm) -> int:
        """Upper bound on what a step of so many tokens and logits rows holds beside weights and KV."""
        ...


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model and what was chosen for it. `backend` answers for `kernels/ops.py`."""

    model: Model
    backend: ops.BackendChoice
    config: ModelConfig
    device: torch.device
    dtype: torch.dtype


def load_model(config: EngineConfig, progress: Callable[[float, str], None]) -> LoadedModel:
    """Reads the weights that `config.model` names.

    Args:
        progress: called with the share done, 0 … 1, and what is being done.

    Raises:
        EngineError: `model_unavailable` (not there, or damaged), `unsupported_model` (named what) or `invalid_setting`.
    """
    device = usable_device(config.device)
    backend = _backend(device)
    dtype = choose_dtype(config.dtype, device)
    path = Path(config.model)
    progress(0.0, f"reading {path.name}")
    refuse_impossible_host_tier(config.kv_host_gib, device)
    opened = _open(path)
    model: Model
    model_config: ModelConfig
    if opened is None:
        from pagedd.engine.model.hf_adapter import load_adapted  # transformers takes seconds to import

        model, model_config = load_adapted(path, device, dtype, progress, gathers_kv=backend.gathers_kv)
    else:
        decoder_config, checkpoint = opened
        _refuse_what_is_too_large(config, opened, device, dtype)
        model = _make_decoder(config, decoder_config, checkpoint, backend, device, dtype, progress)
        model_config = decoder_config
    kind, number_type = model_config.architecture, str(dtype).removeprefix("torch.")
    log.info("%s is a model of kind %s and computes in %s on %s", path.name, kind, number_type, device)
    return LoadedModel(model, backend, model_config, device, dtype)


def check_loadable(settings: EngineConfig) -> tuple[DecoderConfig, Checkpoint] | None:
    """Raises what `load_model` would, as far as it shows without a weight being read; the config and the weights to be.

    Of a model that only transformers can read, nothing but the machine is known before: None.
    """
    device = usable_device(settings.device)
    dtype = choose_dtype(settings.dtype, device)
    refuse_impossible_host_tier(settings.kv_host_gib, device)
    opened = _open(Path(settings.model))
    if opened is None:
        return None
    config, _ = opened
    _refuse_what_is_too_large(settings, opened, device, dtype)
    obstacle = _obstacle_to_cpp(config, device, dtype)
    if obstacle is not None:
        _refuse_weight_form(settings, dtype, obstacle)
    refuse_unfit(settings, config.max_position, CPP_KV_FORMS if obstacle is None else FORMS.keys())
    if obstacle is not None:
        _refuse_what_cannot_be_launched(settings, config, _backend(device), device, dtype)
    return opened


def _refuse_what_is_too_large(
    settings: EngineConfig,
    opened: tuple[DecoderConfig, FileCheckpoint],
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """What could not be held if nobody else had anything never will be: reading the weights would take minutes."""
    config, checkpoint = opened
    weight_bytes = checkpoint.least_bytes(dtype.itemsize)
    if device.type == "cuda" and weight_bytes > (total := total_bytes(device)):
        gib = 1 << 30
        raise EngineError(
            "unsupported_device",
            f"the model's weights take {weight_bytes / gib:.1f} GiB at least, {device} has {total / gib:.1f} in all; "
            "choose a smaller model or one in fewer bits, or use device cpu",
        )
    if settings.weight_dtype != "auto":
        weight_bytes = 0  # they may take less than in the file
    refuse_impossible_pools(settings, config, checkpoint, device, dtype, weight_bytes=weight_bytes)


def _open(path: Path) -> tuple[DecoderConfig, FileCheckpoint] | None:
    """The config and the weights, not read yet; None for a model that only transformers can read."""
    if not path.exists():
        raise EngineError("model_unavailable", f"{path} does not exist; fetch the model first")
    if not path.is_dir():
        from pagedd.engine.model.gguf import GGUFCheckpoint  # needs the gguf package, and nothing else here does

        file = GGUFCheckpoint(path)
        return file.config, file
    raw = read_json(path / "config.json")
    if raw.get("model_type") not in FUSED_ARCHITECTURES:
        return None
    if (path / "generation_config.json").exists():
        eos = {*parse_eos(raw), *parse_eos(read_json(path / "generation_config.json"))}
        raw["eos_token_id"] = sorted(eos)
    return parse_decoder_config(raw), SafetensorsCheckpoint(path)


def _make_decoder(
    settings: EngineConfig,
    config: DecoderConfig,
    checkpoint: Checkpoint,
    backend: ops.BackendChoice,
    device: torch.device,
    dtype: torch.dtype,
    progress: Callable[[float, str], None],
) -> Model:
    """The C++ decoder where it can serve, else the one over torch operations; the log says which, and why."""
    obstacle = _obstacle_to_cpp(config, device, dtype)
    if obstacle is None:
        progress(0.0, "C++ kernels")
        try:
            extension = _load_extension()
        except cpu.KernelsUnavailableError as error:
            obstacle = str(error)
        else:
            form = settings.weight_dtype
            if form == "auto" and settings.dtype == "float32":
                form = "float32"
            refuse_unfit(settings, config.max_position, CPP_KV_FORMS)
            in_cpp = CpuDecoder(extension, config, checkpoint, form, progress)
            sizes = ", ".join(f"{size / 2**20:.0f} MiB {name}" for name, size in in_cpp.forms.items())
            log.info("the weights take %s; a step is one C++ call, compiled for %s", sizes, extension.INSTRUCTIONS)
            return in_cpp
    _refuse_weight_form(settings, dtype, obstacle)
    refuse_unfit(settings, config.max_position, FORMS.keys())
    _refuse_what_cannot_be_launched(settings, config, backend, device, dtype)
    keeps_packed = backend.keeps_weights_packed and settings.weight_dtype == "auto" and settings.dtype != "float32"
    level = logging.WARNING if device.type == "cpu" else logging.INFO
    log.log(level, "the decoder runs kernel by kernel, because %s", obstacle)
    decoder = Decoder(
        config, checkpoint, dtype, device, progress, keeps_packed=keeps_packed, gathers_kv=backend.gathers_kv
    )
    packed = ", as the file quantizes them" if decoder.has_quantized_weights else ""
    log.info("the weights take %.0f MiB%s", decoder.weight_bytes / 2**20, packed)
    if decoder.dequantized:
        count, first = len(decoder.dequantized), decoder.dequantized[0]
        log.warning("%d quantized matrices, %s the first, have no packed form here and take 16 bits", count, first)
    return decoder


def _refuse_weight_form(settings: EngineConfig, dtype: torch.dtype, obstacle: str) -> None:
    """Without the C++ kernels weights are as the activations, or as the file has them."""
    if settings.weight_dtype not in ("auto", _SHORT_NAMES.get(dtype)):
        raise EngineError(
            "invalid_setting", f"weight_dtype {settings.weight_dtype} needs the C++ kernels: {obstacle}; use auto"
        )


def _backend(device: torch.device) -> ops.BackendChoice:
    try:
        return ops.select_backend(device)
    except ValueError as error:
        raise EngineError("invalid_setting", str(error)) from error


def _refuse_what_cannot_be_launched(
    settings: EngineConfig,
    config: DecoderConfig,
    backend: ops.BackendChoice,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """As far as the form of the cache is known before the weights are: auto may still make it int8."""
    if backend.name != "triton":
        return
    from pagedd.kernels.triton.card import card_of
    from pagedd.kernels.triton.limits import obstacle  # Triton, which not every machine has

    found = obstacle(
        card_of(device).arch,
        dtype,
        form_of(dtype) if settings.kv_cache_dtype == "auto" else FORMS[settings.kv_cache_dtype],
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        hidden_size=config.hidden_size,
    )
    if found is not None:
        raise EngineError("unsupported_model", found)


def _load_extension() -> ModuleType:
    """Raises `KernelsUnavailableError` also where torch's own products are faster."""
    extension = cpu.load()
    if extension.INSTRUCTIONS is None:
        raise cpu.KernelsUnavailableError("the C++ kernels' products are slow on a processor without AVX2")
    return extension


def _obstacle_to_cpp(config: DecoderConfig, device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cpu":
        return f"the device is {device}"
    if (asked := os.environ.get(ops.BACKEND_VARIABLE)) is not None:
        return f"{ops.BACKEND_VARIABLE}={asked} asks for it"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"the C++ kernels compute in float32 or bfloat16, not in {dtype}"
    return unfit_for_cpu(config)
