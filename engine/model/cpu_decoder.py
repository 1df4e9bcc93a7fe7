"""The Llama-family decoder as one C++ call a step: what serves on a CPU that has a compiler.

Owns the choice of each weight's form and its packing. The pass itself is `kernels/cpu/decoder.cpp`; the same model over
torch operations, wherever this one cannot serve, is `decoder.py`.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from pagedd.engine.batch import Batch
from pagedd.engine.kv.storage import KVStorage
from pagedd.engine.model.config import DecoderConfig
from pagedd.engine.model.decoder import CheckedWeights, Checkpoint
from pagedd.engine.model.rope import RotaryEmbedding
from pagedd.engine.model.weight_blocks import BlockCheckpoint, stacked_blocks
from pagedd.kernels.kv_form import KVForm
from pagedd.kernels.packed_weight import GROUP

TILE = 16
_QUANTIZED = {"int8", "int4"}
# Of `attention.cpp`: rows of an item, keys of a tile, and the most pieces of split contexts for each thread.
_ITEM_ROWS, _TILE_KEYS, _PIECES_PER_THREAD = 192, 64, 4
MAX_HEAD_DIM = 256
KV_FORMS = frozenset({"float32", "bf16", "int8", "fp8", "k8v4", "int4"})


def unfit_for_cpu(config: DecoderConfig) -> str | None:
    """Why the C++ decoder cannot run a model of these sizes; `None` when it can."""
    if config.head_dim % TILE or config.head_dim > MAX_HEAD_DIM:
        return f"head_dim {config.head_dim} is not a multiple of {TILE} up to {MAX_HEAD_DIM}"
    for name, size, multiple in (
        ("hidden_size", config.hidden_size, GROUP),
        ("intermediate_size", config.intermediate_size, GROUP),
        ("num_heads × head_dim", config.num_heads * config.head_dim, GROUP),
        ("num_kv_heads × head_dim", config.num_kv_heads * config.head_dim, TILE),
    ):
        if size % multiple:
            return f"{name} {size} is not a multiple of {multiple}"
    return None


class CpuDecoder:
    """Tokens in, logits out, over `extension` (see `kernels/cpu`).

    Attributes:
        kv_forms: forms of the KV cache that attention reads.
        weight_bytes: what the packed weights take.
        own_kernels: as in `load.Model`.
        has_quantized_weights: some of them are in 8 bits or fewer.
        forms: form → bytes of the weights that are held in it.
    """

    def __init__(
        self,
        extension: ModuleType,
        config: DecoderConfig,
        checkpoint: Checkpoint,
        form: str,
        progress: Callable[[float, str], None],
    ) -> None:
        """`form`: float32, bf16, int8 or int4; `auto` keeps what the file quantizes and takes bf16 for the rest."""
        self.kv_forms = KV_FORMS
        self._config = config
        packer = _Packer(extension, checkpoint, form)  # not kept: it holds the whole file
        self._rotary = RotaryEmbedding(config.rope, config.head_dim, torch.device("cpu"))
        vocab_size, hidden_size = config.vocab_size, config.hidden_size
        embedding = packer.linear({"model.embed_tokens": vocab_size}, hidden_size)
        tied = config.tie_word_embeddings
        head = embedding if tied else packer.linear({"lm_head": vocab_size}, hidden_size)
        self._decoder: Any = extension.Decoder(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            embedding=embedding,
            final_norm=packer.vector("model.norm.weight", hidden_size),
            head=head,
        )
        for index in range(config.num_layers):
            self._decoder.add_layer(**_layer(config, packer, index))
            progress((index + 1) / config.num_layers, f"layer {index + 1} of {config.num_layers}")
        self.forms = packer.bytes_by_form
        self.weight_bytes = sum(self.forms.values())
        self.own_kernels: str | None = "cpp"
        self.can_be_captured = False
        self.has_quantized_weights = not _QUANTIZED.isdisjoint(self.forms)

    def forward(self, batch: Batch, kv: KVStorage) -> torch.Tensor:
        """Computes every token of `batch`, writes their KV: [num_rows, vocab_size] float32 logits of `logits_rows`."""
        cos, sin = self._rotary(batch.positions)
        logits: torch.Tensor = self._decoder.forward(
            token_ids=batch.token_ids,
            cos=cos,
            sin=sin,
            slots=batch.attention.slot_mapping,
            query_starts=batch.attention.query_starts,
            context_lens=batch.attention.context_lens,
            block_tables=batch.attention.block_tables,
            logits_rows=batch.logits_rows,
            kv=kv.data,
            kv_form=kv.form.name,
            num_blocks=kv.num_blocks,
            block_size=kv.block_size,
            open_keys=kv.open_keys,
            open_slots=batch.attention.open_slots,
            open_tables=batch.attention.open_tables,
        )
        return logits[:, : self._config.vocab_size]

    def activation_bytes(self, num_tokens: int, num_rows: int, max_context_len: int, kv_form: KVForm) -> int:
        """Upper bound on a step's scratch memory and logits: every row of `decoder.cpp`'s scratch as float32."""
        config, num_threads = self._config, torch.get_num_threads()
        query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        widest = max(config.hidden_size, config.intermediate_size, query_size)
        token = config.hidden_size + 2 * query_size + 2 * kv_size + config.intermediate_size + widest
        # A thread's attention: queries, sums and a tile of keys; and partial results of contexts that were split.
        attention = _ITEM_ROWS * (2 * config.head_dim + 32) + 4 * _TILE_KEYS * config.head_dim
        partial = _PIECES_PER_THREAD * _ITEM_ROWS * (config.head_dim + 16)
        sampled = num_rows * (config.hidden_size + config.vocab_size + TILE)
        return 4 * (num_tokens * token + sampled + num_threads * (attention + partial + 2 * widest)) + (1 << 20)

    @property
    def scratch_bytes(self) -> int:
        """What is held between steps for intermediate results: as much as the largest step so far needed."""
        held: int = self._decoder.scratch_bytes
        return held


class _Packer:
    """Takes vectors and matrices out of a checkpoint, packs the matrices, and counts what they take."""

    def __init__(self, extension: ModuleType, checkpoint: Checkpoint, form: str) -> None:
        self._extension: Any = extension
        self._checkpoint = checkpoint
        self._weights = CheckedWeights(checkpoint, torch.float32, torch.device("cpu"))
        self._form = form
        self.bytes_by_form: dict[str, int] = {}

    def vector(self, name: str, size: int) -> torch.Tensor:
        """[size] float32."""
        return self._weights.take(name, size).contiguous()

    def linear(
        self, parts: dict[str, int], in_features: int, *, has_bias: bool = False, interleave: bool = False
    ) -> Any:
        """One product of the matrices `parts` (name → rows), stacked; with `interleave` their tiles take turns."""
        form, tiles = self._pack(parts, in_features, len(parts) if interleave else 1)
        bias = None
        if has_bias:
            vectors = [self.vector(f"{name}.bias", size) for name, size in parts.items()]
            bias = _arrange(torch.cat(vectors), len(parts) if interleave else 1)
        self.bytes_by_form[form] = self.bytes_by_form.get(form, 0) + tiles.nbytes
        return self._extension.PackedLinear(tiles, form, in_features, bias)

    def _pack(self, parts: dict[str, int], in_features: int, num_turns: int) -> tuple[str, torch.Tensor]:
        names = [f"{name}.weight" for name in parts]
        blocks = stacked_blocks(self._checkpoint, names) if self._form == "auto" else None
        if blocks is not None and blocks.q.shape == (sum(parts.values()), in_features):
            form = f"int{blocks.bits}"
            arrays = (_arrange(torch.from_numpy(array), num_turns) for array in (blocks.q, blocks.scale, blocks.offset))
            return form, self._extension.pack_blocks(*arrays, form)
        form = self._form
        if form == "auto":
            # 8 bits for what the file quantizes in a way that does not fit the blocks, 16 for the rest.
            form = "int8" if self._is_quantized(names) else "bf16"
        matrices = [
            self._weights.take(name, rows, in_features) for name, rows in zip(names, parts.values(), strict=True)
        ]
        return form, self._extension.pack(_arrange(torch.cat(matrices), num_turns), form)

    def _is_quantized(self, names: list[str]) -> bool:
        return isinstance(self._checkpoint, BlockCheckpoint) and all(map(self._checkpoint.is_quantized, names))


def _layer(config: DecoderConfig, packer: _Packer, index: int) -> dict[str, Any]:
    """The arguments of `Decoder.add_layer`."""
    prefix = f"model.layers.{index}."
    hidden_size, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    query_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    return {
        "attention_norm": packer.vector(prefix + "input_layernorm.weight", hidden_size),
        "qkv": packer.linear(
            {attention + "q_proj": query_size, attention + "k_proj": kv_size, attention + "v_proj": kv_size},
            hidden_size,
            has_bias=config.qkv_bias,
        ),
        "query_norm": packer.vector(attention + "q_norm.weight", head_dim) if config.qk_norm else None,
        "key_norm": packer.vector(attention + "k_norm.weight", head_dim) if config.qk_norm else None,
        "output": packer.linear({attention + "o_proj": hidden_size}, query_size, has_bias=config.output_bias),
        "mlp_norm": packer.vector(prefix + "post_attention_layernorm.weight", hidden_size),
        "gate_up": packer.linear(
            {mlp + "gate_proj": inner, mlp + "up_proj": inner},
            hidden_size,
            has_bias=config.mlp_bias,
            interleave=True,
        ),
        "down": packer.linear({mlp + "down_proj": hidden_size}, inner, has_bias=config.mlp_bias),
        "sliding_window": config.layer_windows[index] or 0,
    }


def _arrange(stacked: torch.Tensor, num_turns: int) -> torch.Tensor:
    """Rows as the product wants them: tiles of the `num_turns` equal parts in turn, the last tile filled with zeros."""
    padded = torch.nn.functional.pad(stacked, (0, 0) * (stacked.dim() - 1) + (0, -len(stacked) % TILE))
    tiles = padded.view(num_turns, -1, TILE, *padded.shape[1:])
    return tiles.transpose(0, 1).reshape(padded.shape).contiguous()
