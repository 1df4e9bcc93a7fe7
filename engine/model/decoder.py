"""The fused decoder of the Llama family (Llama, Mistral, Qwen 2, Qwen 3, SmolLM) over paged KV.

Owns the weights and the order of the kernels. Where weights come from is in `load.py`; what a batch is, in
`engine/batch.py`; the arithmetic, in `kernels/ops.py`. Query, key and value are one product, as are gate and up.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from pagedd.engine.batch import Batch
from pagedd.engine.kv.storage import KVStorage
from pagedd.engine.model.config import DecoderConfig
from pagedd.engine.model.json_fields import malformed
from pagedd.engine.model.linear import Linear, QuantizedLinear, make_linear
from pagedd.engine.model.rope import RotaryEmbedding
from pagedd.engine.model.weight_blocks import BlockCheckpoint, stacked_blocks, stacked_nested_blocks
from pagedd.kernels import ops
from pagedd.kernels.kv_form import FORMS, KVForm
from pagedd.kernels.layout import MAX_GATHERED_SLOTS, KVLayer, has_open_keys


class Checkpoint(Protocol):
    """Tensors under transformers' names (`model.layers.0.mlp.up_proj.weight`), in any float dtype, on the CPU."""

    def get(self, name: str) -> torch.Tensor: ...
    def __contains__(self, name: str) -> bool: ...


class CheckedWeights:
    """A checkpoint's tensors, checked for shape and brought to the model's dtype and device.

    Attributes:
        dequantized: names of matrices that should have stayed as the file quantizes them, and have no such form.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self.dequantized: list[str] = []
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device

    def take(self, name: str, *shape: int) -> torch.Tensor:
        if name not in self._checkpoint:
            raise malformed(f"tensor {name} is missing from the weights")
        tensor = self._checkpoint.get(name)
        if tuple(tensor.shape) != shape:
            raise malformed(f"tensor {name} is {list(tensor.shape)}, {list(shape)} expected")
        return tensor.to(self._device, self._dtype)

    def linear(
        self,
        parts: dict[str, int],
        in_features: int,
        *,
        has_bias: bool = False,
        keeps_packed: bool = False,
        matrix: torch.Tensor | None = None,
    ) -> Linear:
        """One product of the matrices `parts` (name → rows), stacked; of `matrix` where they are there already."""
        names = [f"{name}.weight" for name in parts]
        biases = [self.take(f"{name}.bias", size) for name, size in parts.items() if has_bias]
        bias = torch.cat(biases) if biases else None
        if keeps_packed:
            blocks = stacked_blocks(self._checkpoint, names) or stacked_nested_blocks(self._checkpoint, names)
            if blocks is not None and blocks.q.shape == (sum(parts.values()), in_features):
                return QuantizedLinear(blocks, bias, self._device)
            if isinstance(self._checkpoint, BlockCheckpoint):
                self.dequantized += [name for name in names if self._checkpoint.is_quantized(name)]
        if matrix is None:
            matrix = torch.cat([self.take(f"{name}.weight", size, in_features) for name, size in parts.items()])
        return make_linear(matrix, bias)


@dataclass(frozen=True, slots=True)
class _Layer:
    """One decoder layer's weights. Norms are [hidden_size], `query_norm` and `key_norm` [head_dim] or None."""

    attention_norm: torch.Tensor
    qkv: Linear  # hidden_size → (num_heads + 2 × num_kv_heads) × head_dim
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: Linear  # num_heads × head_dim → hidden_size
    mlp_norm: torch.Tensor
    gate_up: Linear  # hidden_size → 2 × intermediate_size
    down: Linear  # intermediate_size → hidden_size
    sliding_window: int | None


class Decoder:
    """Tokens in, logits out. `weight_bytes` is what its weights take; `kv_forms` and the rest as in `load.Model`.

    Attributes:
        dequantized: names of the matrices that take 16 bits a weight though the file quantizes them.
    """

    def __init__(
        self,
        config: DecoderConfig,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[float, str], None],
        *,
        keeps_packed: bool = False,
        gathers_kv: bool = True,
    ) -> None:
        """
        Args:
            keeps_packed: matrices that the checkpoint quantizes stay so, else they are dequantized on the way in.
            gathers_kv: attention copies keys and values together before it multiplies them.
        """
        self.kv_forms = frozenset(FORMS)
        self.own_kernels: str | None = None
        self.can_be_captured = True
        self._config = config
        self._gathers_kv = gathers_kv
        self._scale = config.head_dim**-0.5
        weights = CheckedWeights(checkpoint, dtype, device)
        self._embedding = weights.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._layers: list[_Layer] = []
        for index in range(config.num_layers):
            self._layers.append(_load_layer(config, weights, index, keeps_packed))
            progress((index + 1) / config.num_layers, f"layer {index + 1} of {config.num_layers}")
        self._final_norm = weights.take("model.norm.weight", config.hidden_size)
        # Tied weights are packed a second time: the product wants another layout than the look-up.
        name, is_tied = ("model.embed_tokens", True) if config.tie_word_embeddings else ("lm_head", False)
        self._head = weights.linear(
            {name: config.vocab_size},
            config.hidden_size,
            keeps_packed=keeps_packed,
            matrix=self._embedding if is_tied else None,
        )
        self.dequantized = weights.dequantized
        self._rotary = RotaryEmbedding(config.rope, config.head_dim, device)
        linears = [part for layer in self._layers for part in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        products = (*linears, self._head)
        self.has_quantized_weights = any(isinstance(part, QuantizedLinear) for part in products)
        self.weight_bytes = self._embedding.nbytes + self._head.num_bytes + sum(part.num_bytes for part in linears)

    def forward(self, batch: Batch, kv: KVStorage) -> torch.Tensor:
        """Computes every token of `batch`, writes their KV, and returns the logits of `batch.logits_rows`.

        Returns:
            [num_rows, vocab_size] float32.
        """
        config = self._config
        eps = config.rms_norm_eps
        residual = F.embedding(batch.token_ids, self._embedding)
        cos, sin = self._rotary(batch.positions)
        layer = self._layers[0]
        x = ops.rms_norm(residual, layer.attention_norm, eps)
        for index, layer in enumerate(self._layers):
            if index:
                x, residual = ops.add_rms_norm(x, residual, layer.attention_norm, eps)
            x = self._attend(x, layer, kv.layer(index), batch, cos, sin)
            x, residual = ops.add_rms_norm(x, residual, layer.mlp_norm, eps)
            x = layer.down(ops.silu_and_mul(layer.gate_up(x)))
        if batch.logits_rows.numel() == 0:  # the middle of a prefill
            return torch.empty(0, config.vocab_size, device=x.device)
        # Only the rows that somebody samples from go on: the head is the largest product of all.
        x, _ = ops.add_rms_norm(x[batch.logits_rows], residual[batch.logits_rows], self._final_norm, eps)
        return self._head(x).float()

    def activation_bytes(self, num_tokens: int, num_rows: int, max_context_len: int, kv_form: KVForm) -> int:
        """Upper bound on what a step of so many tokens and logits rows holds beside weights and KV.

        The layers' own tensors; the KV gathered for attention; the logits, as computed and in float32.
        """
        config = self._config
        qkv_size = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        per_token = 4 * config.hidden_size + 3 * qkv_size + 4 * config.intermediate_size
        item = self._embedding.element_size()
        num_gathered = max(max_context_len, MAX_GATHERED_SLOTS) if self._gathers_kv else 0
        gathered = num_gathered * config.num_kv_heads * config.head_dim
        logits = 2 * num_rows * config.vocab_size * torch.float32.itemsize
        return num_tokens * per_token * item + gathered * kv_form.gathered_bytes(item) + logits

    def _attend(
        self,
        x: torch.Tensor,  # [num_tokens, hidden_size]
        layer: _Layer,
        kv_layer: KVLayer,
        batch: Batch,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        config = self._config
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        heads = layer.qkv(x).view(x.shape[0], num_heads + 2 * num_kv_heads, config.head_dim)
        query, key, value = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query = ops.rms_norm(query, layer.query_norm, config.rms_norm_eps)
            key = ops.rms_norm(key, layer.key_norm, config.rms_norm_eps)
        slots = batch.attention.slot_mapping, batch.attention.open_slots
        ops.rope_and_write_kv(query, key, value, cos, sin, kv_layer, *slots)
        if has_open_keys(kv_layer):
            ops.close_blocks(kv_layer, batch.attention)
        attended = ops.paged_attention(
            query, kv_layer, batch.attention, scale=self._scale, sliding_window=layer.sliding_window
        )
        return layer.output(attended.view(x.shape[0], num_heads * config.head_dim))


def _load_layer(config: DecoderConfig, weights: CheckedWeights, index: int, keeps_packed: bool) -> _Layer:
    prefix = f"model.layers.{index}."
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    query_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim

    def norm(name: str, size: int) -> torch.Tensor:
        return weights.take(f"{prefix}{name}.weight", size)

    def linear(parts: dict[str, int], in_features: int, has_bias: bool) -> Linear:
        named = {prefix + name: size for name, size in parts.items()}
        return weights.linear(named, in_features, has_bias=has_bias, keeps_packed=keeps_packed)

    return _Layer(
        attention_norm=norm("input_layernorm", hidden),
        qkv=linear(
            {"self_attn.q_proj": query_size, "self_attn.k_proj": kv_size, "self_attn.v_proj": kv_size},
            hidden,
            config.qkv_bias,
        ),
        query_norm=norm("self_attn.q_norm", head_dim) if config.qk_norm else None,
        key_norm=norm("self_attn.k_norm", head_dim) if config.qk_norm else None,
        output=linear({"self_attn.o_proj": hidden}, query_size, config.output_bias),
        mlp_norm=norm("post_attention_layernorm", hidden),
        gate_up=linear({"mlp.gate_proj": inner, "mlp.up_proj": inner}, hidden, config.mlp_bias),
        down=linear({"mlp.down_proj": hidden}, inner, config.mlp_bias),
        sliding_window=config.layer_windows[index],
    )
