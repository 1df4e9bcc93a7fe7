"""Runs other decoder models of transformers over the same paged KV and kernels, or refuses them.

A model keeps its own code; only its attention is answered here, through transformers' `AttentionInterface`. Tokens of
all sequences go in as one row with explicit positions, so whatever mixes tokens outside attention, or builds a mask of
its own, cannot be right: what is known to is refused by name, and a probe at load time holds the paged path's logits
against the model's own eager attention. Code from a model's repository is never run.

The Llama family has its own decoder, `decoder.py`.
"""

import inspect
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from pagedd.engine.batch import AttentionMetadata, Batch
from pagedd.engine.kv.storage import KVStorage
from pagedd.engine.model.config import ModelConfig, parse_eos
from pagedd.engine.model.json_fields import malformed, unsupported
from pagedd.kernels import ops
from pagedd.kernels.kv_form import FORMS, KVForm, form_of
from pagedd.kernels.layout import MAX_GATHERED_SLOTS, has_open_keys

log = logging.getLogger(__name__)

_NAME = "pagedd"  # of the attention implementation; without a mask function of that name, transformers builds no mask

_PROBE_TOKENS = 24
_LONGEST_PROBED_WINDOW = 512
_PROBE_BLOCK_SIZE = 8
# Largest difference of any logit in the probe, as a share of the largest logit: rounding stays a decade below, a wrong
# mask, position or scale a decade above.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.05}

_LAYER_TYPES = {"full_attention", "sliding_attention"}
_BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}  # frequencies follow the longest sequence of the batch
# Attention arguments without effect on the result. Any other that is set is something that the kernels do not do.
_HARMLESS_ARGUMENTS = {
    "cache_position",
    "dropout",  # 0 outside training
    "is_causal",  # False is refused before
    "output_attentions",
    "output_hidden_states",
    "position_ids",
    "use_cache",
}


@dataclass(slots=True)
class _Call:
    """What one layer's attention was asked for in the discovery pass."""

    num_kv_heads: int
    head_dim: int
    sliding_window: int | None


@dataclass(slots=True)
class _Pass:
    """What the attention function needs of the forward pass under way; without `kv` it only notes what is asked."""

    attention: AttentionMetadata | None = None
    kv: KVStorage | None = None
    calls: dict[int, _Call] = field(default_factory=dict)


_current: _Pass | None = None  # the engine runs one pass at a time


@contextmanager
def _running(one_pass: _Pass) -> Iterator[None]:
    global _current
    _current = one_pass
    try:
        yield
    finally:
        _current = None


class AdaptedModel:
    """A transformers model whose attention reads and writes paged KV."""

    def __init__(self, model: PreTrainedModel, *, gathers_kv: bool = True) -> None:
        """
        Args:
            gathers_kv: attention copies keys and values together before it multiplies them.
        """
        self.kv_forms = frozenset(FORMS)
        self.own_kernels: str | None = None
        self.can_be_captured = False  # what transformers does in a model's forward, it may do on the host
        self.has_quantized_weights = False
        self._model = model
        self._gathers_kv = gathers_kv
        self._kv_width = 0  # KV heads × head size of the widest layer, once one has asked
        self._takes_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        weights = list(model.parameters())
        self.weight_bytes = sum(weight.nbytes for weight in weights)
        self._vocab_size: int = model.config.get_text_config().vocab_size
        self._widest = max(size for weight in weights for size in weight.shape if size != self._vocab_size)

    def forward(self, batch: Batch, kv: KVStorage) -> torch.Tensor:
        """Computes every token of `batch`, writes their KV, and returns the logits of `batch.logits_rows`, float32."""
        return self._forward(batch.token_ids, batch.positions, batch.logits_rows, _Pass(batch.attention, kv))

    def activation_bytes(self, num_tokens: int, num_rows: int, max_context_len: int, kv_form: KVForm) -> int:
        """Upper bound on what a step of so many tokens and logits rows holds beside weights and KV."""
        item = self._model.dtype.itemsize
        logits = 2 * num_rows * self._vocab_size * torch.float32.itemsize
        num_gathered = max(max_context_len, MAX_GATHERED_SLOTS) if self._gathers_kv else 0
        gathered = num_gathered * self._kv_width * kv_form.gathered_bytes(item)
        return 12 * num_tokens * item * self._widest + gathered + logits

    def discover(self, token_ids: torch.Tensor) -> dict[int, _Call]:
        """What each layer's attention asks for, by layer index."""
        one_pass = _Pass()
        positions = torch.arange(len(token_ids), device=token_ids.device)
        self._forward(token_ids, positions, positions, one_pass)
        self._kv_width = max((call.num_kv_heads * call.head_dim for call in one_pass.calls.values()), default=0)
        return one_pass.calls

    def _forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, one_pass: _Pass
    ) -> torch.Tensor:
        arguments: dict[str, Any] = {"logits_to_keep": rows} if self._takes_rows else {}
        with _running(one_pass):
            output = self._model(
                input_ids=token_ids[None], position_ids=positions[None], use_cache=False, return_dict=True, **arguments
            )
        logits: torch.Tensor = output.logits[0]
        return (logits if self._takes_rows else logits[rows]).float()


def load_adapted(
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    progress: Callable[[float, str], None],
    *,
    gathers_kv: bool = True,
) -> tuple[AdaptedModel, ModelConfig]:
    """Loads a folder with config.json and safetensors through transformers, and probes it.

    Raises:
        EngineError: `unsupported_model` names what is not exact; `model_unavailable` when the weights are damaged.
    """
    config = _read_config(folder)
    _refuse_what_is_known(config)
    progress(0.1, f"{config.model_type} through transformers")
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation="eager",
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
        )
    except ValueError as error:
        raise unsupported(f"{config.model_type} as a causal language model ({_first_line(error)})") from error
    except (OSError, RuntimeError) as error:
        raise malformed(f"{folder}: transformers cannot load the weights ({_first_line(error)})") from error
    progress(0.7, "probing the paged path")
    return adapt(model.to(device).eval(), gathers_kv=gathers_kv)


@torch.inference_mode()
def adapt(model: PreTrainedModel, *, gathers_kv: bool = True) -> tuple[AdaptedModel, ModelConfig]:
    """Switches a loaded model's attention to the paged kernels, once the probe has shown that nothing changes."""
    config = model.config.get_text_config()
    _refuse_what_is_known(config)
    window = getattr(config, "sliding_window", None) or 0
    num_tokens = _PROBE_TOKENS + (window if window <= _LONGEST_PROBED_WINDOW else 0)
    max_position = getattr(config, "max_position_embeddings", None)
    if max_position is None:
        raise unsupported(f"{config.model_type} without max_position_embeddings")
    num_tokens = min(num_tokens, max_position)
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(config.vocab_size, (num_tokens,), generator=generator).to(model.device)
    expected = model(input_ids=token_ids[None], use_cache=False, return_dict=True).logits[0].float()
    try:
        model.set_attn_implementation(_NAME)
    except ValueError as error:
        raise unsupported(f"{config.model_type} with another attention ({_first_line(error)})") from error

    adapted = AdaptedModel(model, gathers_kv=gathers_kv)
    calls = adapted.discover(token_ids)
    shape = _common_shape(config, calls)
    model_config = ModelConfig(
        architecture=config.model_type,
        vocab_size=config.vocab_size,
        num_layers=len(calls),
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position=max_position,
        eos_token_ids=tuple(sorted({*parse_eos(config.to_dict()), *parse_eos(model.generation_config.to_dict())})),
    )
    difference = (_probe(adapted, model_config, token_ids, model.dtype) - expected).abs().max().item()
    allowed = _TOLERANCE[model.dtype] * expected.abs().max().item()
    log.info("in a probe of %s logits differ by %.2g, and %.2g are allowed", config.model_type, difference, allowed)
    if not difference <= allowed:  # NaN too
        raise unsupported(f"{config.model_type} (paged logits differ by {difference:.2g}, {allowed:.2g} allowed)")
    return adapted, model_config


def _probe(adapted: AdaptedModel, config: ModelConfig, token_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Logits of every row, computed in two chunks and one decode, in blocks that are out of order."""
    device, num_tokens = token_ids.device, len(token_ids)
    num_blocks = -(-num_tokens // _PROBE_BLOCK_SIZE)
    kv = KVStorage(config, num_blocks, _PROBE_BLOCK_SIZE, form_of(dtype), device)
    table = torch.arange(num_blocks - 1, -1, -1, device=device, dtype=torch.int32)
    logits = []
    bounds = (0, num_tokens // 2, num_tokens - 1, num_tokens)
    for start, end in itertools.pairwise(bounds):
        positions = torch.arange(start, end, device=device)
        slots = table[positions // _PROBE_BLOCK_SIZE].long() * _PROBE_BLOCK_SIZE + positions % _PROBE_BLOCK_SIZE
        attention = AttentionMetadata(
            query_starts=torch.tensor([0, end - start], dtype=torch.int32, device=device),
            context_lens=torch.tensor([end], dtype=torch.int32, device=device),
            block_tables=table[None],
            slot_mapping=slots,
            max_query_len=end - start,
            max_context_len=end,
            num_decodes=int(end - start == 1),
            open_slots=slots[:0],
            open_tables=table[None, :0],
        )
        batch = Batch(token_ids[start:end], positions, torch.arange(end - start, device=device), attention)
        logits.append(adapted.forward(batch, kv))
    return torch.cat(logits)


def _paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, num_heads, num_tokens, head_dim]
    key: torch.Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    value: torch.Tensor,  # the same
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in every attention layer. Returns [1, num_tokens, num_heads, head_dim]."""
    one_pass = _current
    if one_pass is None:
        raise RuntimeError("paged attention outside of AdaptedModel.forward")
    query, key, value = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    if one_pass.attention is None or one_pass.kv is None:
        _note(one_pass, module, query, key, value, attention_mask, sliding_window, arguments)
        return torch.zeros_like(query)[None], None
    kv_layer = one_pass.kv.layer(module.layer_idx)  # type: ignore[arg-type]
    ops.write_kv(key, value, kv_layer, one_pass.attention.slot_mapping, one_pass.attention.open_slots)
    if has_open_keys(kv_layer):
        ops.close_blocks(kv_layer, one_pass.attention)
    attended = ops.paged_attention(
        query.contiguous(),  # a model's rope may have laid heads apart
        kv_layer,
        one_pass.attention,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        soft_cap=softcap,
    )
    return attended[None], None


AttentionInterface.register(_NAME, _paged_attention)


def _note(
    one_pass: _Pass,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    sliding_window: int | None,
    arguments: Mapping[str, Any],
) -> None:
    """Records one layer's call and refuses what the kernels do not do."""
    kind = type(module).__name__
    layer_index = getattr(module, "layer_idx", None)
    if not isinstance(layer_index, int) or layer_index in one_pass.calls:
        raise unsupported(f"{kind} whose layer index is {layer_index}")
    if attention_mask is not None:
        raise unsupported(f"{kind}'s own attention mask")
    if not getattr(module, "is_causal", True) or arguments.get("is_causal") is False:
        raise unsupported(f"{kind}'s attention that is not causal")
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        raise unsupported(f"{kind} that attends to more than its own tokens")
    if not query.shape[2] == key.shape[2] == value.shape[2]:
        raise unsupported(f"{kind} with keys of {key.shape[2]} and values of {value.shape[2]}")
    if query.shape[1] % key.shape[1]:
        raise unsupported(f"{kind} with {query.shape[1]} query and {key.shape[1]} KV heads")
    for name, given in arguments.items():
        if given is not None and name not in _HARMLESS_ARGUMENTS:
            raise unsupported(f"{kind}'s attention argument {name!r}")
    one_pass.calls[layer_index] = _Call(key.shape[1], key.shape[2], sliding_window)


def _common_shape(config: PreTrainedConfig, calls: dict[int, _Call]) -> _Call:
    """The one shape that all layers share; refuses what the storage cannot hold, and windows that are not passed on."""
    name, num_layers = config.model_type, config.num_hidden_layers
    if sorted(calls) != list(range(num_layers)):
        raise unsupported(f"{name}: {len(calls)} of its {num_layers} layers use transformers' attention interface")
    shapes = {(call.num_kv_heads, call.head_dim) for call in calls.values()}
    if len(shapes) > 1:
        raise unsupported(f"{name}: layers with different KV shapes {sorted(shapes)}")
    # The probe is too short to notice a long window that is only in the mask which was not built.
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * num_layers
    window = getattr(config, "sliding_window", None)
    for index, kind in enumerate(kinds):
        expected = window if kind == "sliding_attention" else None
        if calls[index].sliding_window != expected:
            raise unsupported(f"{name}: layer {index} has window {expected} and asks for {calls[index].sliding_window}")
    return calls[0]


def _read_config(folder: Path) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, OSError) as error:
        raise unsupported(f"{folder.name}: its architecture ({_first_line(error)})") from error
    return config


def _refuse_what_is_known(config: PreTrainedConfig) -> None:
    """What a short probe might not show."""
    name = config.model_type
    if config.is_encoder_decoder:
        raise unsupported(f"{name}, an encoder-decoder")
    if getattr(config, "quantization_config", None) is not None:
        raise unsupported(f"quantization_config of {name}", "choose an unquantized folder")
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES
    if kinds:
        raise unsupported(f"{name} with layers of {', '.join(sorted(kinds))}")
    if getattr(text, "attention_chunk_size", None):
        raise unsupported(f"chunked attention of {name}")
    for kind in _rope_types(getattr(text, "rope_parameters", None)):
        if kind in _BATCH_DEPENDENT_ROPE:
            raise unsupported(f"rope type {kind!r} of {name}")


def _rope_types(parameters: object) -> Iterator[str]:
    """Rope types anywhere in `rope_parameters`, which some models nest by layer type."""
    if isinstance(parameters, Mapping):
        for name, value in parameters.items():
            if name in ("rope_type", "type") and isinstance(value, str):
                yield value
            else:
                yield from _rope_types(value)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
